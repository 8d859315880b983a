"""Stored states with a known fault: the states of every layer of a tiny verifier, put together
wrongly on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.dataset import Document
from eagle3.extraction.base import States
from eagle3.extraction.transformers import TransformersEngine
from eagle3.parity import Norm
from eagle3.reference import head_norm, reference_layers
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from tests.tiny import make_tiny_verifier

LAYERS = 8
AUX = (1, 3, 5)


@dataclass(frozen=True)
class Lab:
    """A tiny verifier whose last norm changes what it norms, and its states over some documents."""

    folder: Path
    spec: VerifierSpec
    head_path: Path
    head: VerifierHead
    tokens: list[Tensor]
    states: list[States]  # every layer's output, in bfloat16

    @property
    def norm(self) -> Norm:
        return head_norm(self.head)

    def engine(self, dtype: torch.dtype, layers: Sequence[int] | None = None) -> TransformersEngine:
        wanted = reference_layers(LAYERS) if layers is None else layers
        return TransformersEngine.open(self.spec, wanted, dtype, "cpu")

    def documents(
        self,
        aux: Sequence[int] = AUX,
        norms: int = 1,
        final_layer: int = LAYERS - 1,
        shift: int = 0,
        missing: int = 0,
        final_shift: int | None = None,
    ) -> list[Document]:
        """Documents that hold the outputs of layers `aux` and a final state of `norms` last norms.

        Row t holds the state of token t + shift (the rows without one hold copies of the nearest);
        the first `missing` rows are left out.
        """
        made = []
        for number, (tokens, states) in enumerate(zip(self.tokens, self.states, strict=True)):
            rows = torch.arange(len(tokens))
            moved = (rows + shift).clamp(0, len(tokens) - 1)[missing:]
            final = states.aux_TnH[:, final_layer]
            for n in range(norms):
                own = n == 0 and final_layer == LAYERS - 1
                final = states.final_TH if own else self.norm(final).to(final.dtype)
            by = shift if final_shift is None else final_shift
            final = final[(rows + by).clamp(0, len(tokens) - 1)[missing:]]
            made.append(
                Document(
                    id=f"{number:04x}",
                    source="made_up",
                    token_ids=tokens,
                    loss_mask=torch.ones(len(tokens), dtype=torch.uint8),
                    aux=states.aux_TnH[moved][:, list(aux)],
                    final=final,
                    verifier_top1=states.top1_T,
                    verifier_lse=states.lse_T,
                )
            )
        return made


def make_lab(folder: Path, documents: int = 6) -> Lab:
    """Writes the verifier into a folder and runs it."""
    make_tiny_verifier(folder / "verifier", num_hidden_layers=LAYERS, tied=False, spread=0.08)
    weights = load_file(folder / "verifier" / "model.safetensors")
    rng = torch.Generator().manual_seed(3)
    size = weights["model.norm.weight"].shape
    weights["model.norm.weight"] = (0.5 + 2 * torch.rand(size, generator=rng)).bfloat16()
    save_file(weights, folder / "verifier" / "model.safetensors", metadata={"format": "pt"})
    spec = VerifierSpec.open(folder / "verifier")
    write_head(spec, folder / "head.safetensors")
    tokens = [
        torch.randint(3, spec.vocab_size, (30 + 7 * i,), generator=rng, dtype=torch.int32)
        for i in range(documents)
    ]
    head = read_head(folder / "head.safetensors")
    lab = Lab(folder / "verifier", spec, folder / "head.safetensors", head, tokens, [])
    lab.states.extend(lab.engine(torch.bfloat16).extract(tokens))
    return lab
