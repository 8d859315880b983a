"""Hidden states of other programs as documents, read where they lie.

Nothing is copied: a document is read when it is asked for. What our own shards hold besides, the
verifier's argmax and log-sum-exp at each row, is computed at that moment from the final state and
the verifier's head, and kept (eight bytes a token).

Shape suffixes: T tokens of a document, n aux layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3.conventions import Settled, token_mask
from eagle3.dataset import Document, StatesMeta
from eagle3.drafter import rms_norm
from eagle3.errors import HarnessError
from eagle3.formats.foreign_samples import RawSample
from eagle3.formats.foreign_states import ForeignFolder
from eagle3.logits import finish_logits
from eagle3.verifier_head import VerifierHead

CHUNK_BYTES = 256 << 20  # of float32 logits at one time


class ForeignStates(Sequence[Document]):
    """A folder of another program's states as a data set.

    Args:
        device: for the product with the verifier's output matrix, which costs 2·H·V operations a
            token once: seconds in all on a GPU, hours on a CPU for a large verifier.

    Raises:
        HarnessError: names the file of a sample that cannot be used.
    """

    def __init__(
        self, folder: ForeignFolder, head: VerifierHead, settled: Settled, *, device: str
    ) -> None:
        self._folder, self._settled, self._device = folder, settled, device
        self._config = head.config
        self._norm_H: Tensor | None = None
        if settled.final_hidden == "pre_norm":
            self._norm_H = head.norm_weight.to(device)
        self._rows_VH = head.lm_head.to(device)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        self.ids = folder.names
        self.lengths: list[int] = []
        self._starts: list[int] = []
        sample = folder.read(0)
        self._layers, self._dtype = len(sample.aux), sample.final.dtype
        for index in tqdm(range(len(folder.paths)), desc="samples", unit="file"):
            start, length = self._extent(index)
            self._starts.append(start)
            self.lengths.append(length)
        self.meta = StatesMeta(
            verifier=head.config.verifier,
            config_hash=head.config.config_hash,
            engine=folder.kind,
            engine_version="unknown",
            aux_layers=list(settled.aux_layers),
            final_hidden=settled.final_hidden,
            dtype=str(self._dtype).removeprefix("torch."),  # type: ignore[arg-type]
            hidden_size=head.config.hidden_size,
            vocab_size=head.config.vocab_size,
        )

    def _extent(self, index: int) -> tuple[int, int]:
        """First row and number of rows that are no padding; checks the sample."""
        sample = self._folder.read(index)
        where = self._folder.paths[index]
        if len(sample.aux) != self._layers or sample.final.shape[-1] != self._config.hidden_size:
            raise HarnessError(
                "a sample holds other states than the first one", where=where,
                rule=f"{self._layers} aux states of size {self._config.hidden_size}",
                got=f"{len(sample.aux)} of size {sample.final.shape[-1]}",
                fix="remove the sample's file, or extract it again as the others were",
            )  # fmt: skip
        if sample.final.dtype != self._dtype:
            raise HarnessError(
                "a sample's states are of another dtype than the first one's", where=where,
                rule=self._dtype, got=sample.final.dtype,
                fix="the same dtype in all files, or leave the sample out",
            )  # fmt: skip
        low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
        if low < 0 or high >= self._config.vocab_size:
            raise HarnessError(
                "token id outside the verifier's vocabulary", where=where,
                rule=f"0 to {self._config.vocab_size - 1}", got=low if low < 0 else high,
                fix="data of this verifier, or the verifier of this data",
            )  # fmt: skip
        rows = len(sample.token_ids)
        # Only the ends can be padding: two rows tell whether there is any.
        if bool(sample.final[0].any()) and bool(sample.final[-1].any()):
            return 0, rows
        filled = sample.final.any(-1).nonzero()[:, 0]
        if self._settled.padding_rows == "refuse" or not len(filled):
            raise HarnessError(
                "a sample has rows without states at its ends: padding", where=where,
                rule="a state for every token", got=f"{rows - len(filled)} of {rows} rows are zero",
                fix="--padding-rows drop leaves them out, if the tokens there are padding too",
            )  # fmt: skip
        start, end = int(filled[0]), int(filled[-1]) + 1
        mask = sample.loss_mask.bool()
        if bool(mask[:start].any()) or bool(mask[end:].any()):
            raise HarnessError(
                "rows without states are supervised", where=where,
                rule=f"padding outside rows {start} to {end - 1} with a loss mask of 0",
                got=f"{int(mask[:start].sum() + mask[end:].sum())} supervised rows there",
                fix="extract the sample again, or remove its file",
            )  # fmt: skip
        return start, end - start

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self._folder.folder

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids i32[T] and mask u8[T] of a document, without its states."""
        return self._tokens(index, self._folder.read(index))

    def _tokens(self, index: int, sample: RawSample) -> tuple[Tensor, Tensor]:
        rows = slice(self._starts[index], self._starts[index] + self.lengths[index])
        mask = token_mask(sample.loss_mask[rows], self._settled.mask_alignment)
        return sample.token_ids[rows].to(torch.int32), mask.to(torch.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = self._folder.read(index)
        rows = slice(self._starts[index], self._starts[index] + self.lengths[index])
        ids_T, mask_T = self._tokens(index, sample)
        final_TH = sample.final[rows]
        if index not in self._known:
            self._known[index] = self._summarise(final_TH)
        top1_T, lse_T = self._known[index]
        return Document(
            id=self.ids[index],
            source=self._folder.kind,
            token_ids=ids_T,
            loss_mask=mask_T,
            aux=torch.stack([state[rows] for state in sample.aux], 1),
            final=final_TH,
            verifier_top1=top1_T,
            verifier_lse=lse_T,
        )

    @torch.no_grad()
    def _summarise(self, final_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax i32[T] and log-sum-exp f32[T] of the verifier's logits."""
        rows = max(1, CHUNK_BYTES // (4 * len(self._rows_VH)))
        top1s, lses = [], []
        for chunk_NH in final_TH.split(rows):
            states = chunk_NH.to(self._device)
            if self._norm_H is not None:
                states = rms_norm(states.float(), self._norm_H, self._config.rms_norm_eps)
            logits_NV = finish_logits(
                states.to(self._rows_VH.dtype) @ self._rows_VH.T,
                scale=self._config.logit_scale,
                softcap=self._config.logit_softcap,
            ).float()
            top1s.append(logits_NV.max(-1).indices.int().cpu())
            lses.append(torch.logsumexp(logits_NV, -1).cpu())
        return torch.cat(top1s), torch.cat(lses)

    def __getstate__(self) -> dict[str, Any]:
        # A loader process keeps its own; the parent's would travel with every pickle.
        return {**self.__dict__, "_known": {}}
