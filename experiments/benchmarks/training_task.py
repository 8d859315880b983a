"""The same work for every trainer: data, first weights and order of batches, in one folder.

Made up from a seed, or taken from real states. Files that any environment with safetensors reads:

    rows.safetensors    documents end to end, unshifted: `token_ids`, `loss_mask`, `aux`, `final`,
                        `top1`, `lse`, and their `lengths`
    init.safetensors    first weights `drafter.*`, the verifier's `embed`, `target_rows` (its head's
                        rows of the draft vocabulary) and, for states from before it, `norm`
    task.json           the drafter's config, the settings both sides share, batches as lists of
                        documents, documents held out

Legend: N packed rows, V vocabulary, G hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.dataset import Document, StatesDataset
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.initialise import head_rows, new_drafter
from eagle3.loss import TargetHead
from eagle3.packing import packed_order
from eagle3.schedule import plan_steps
from eagle3.seeding import generator
from eagle3.train_settings import TrainSettings
from eagle3.train_step import TrainData
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead, read_head
from eagle3.vocab import DraftVocabulary, read_vocabulary

SEED = 0
DOCUMENTS, HELD_OUT = 8, 2  # made-up ones of full length; real ones: as many rows
ALPHABET = 256  # tokens that made-up documents consist of
FOLLOWS = 0.8  # how often a made-up token is the one that the verifier expects
SIGNAL = 2.0  # of made-up states, in units of their noise
SMALL = HeadConfig(  # SmolLM2-135M's shape
    verifier="made up", config_hash="0" * 16, model_type="llama", hidden_size=576,
    num_hidden_layers=30, vocab_size=49152, intermediate_size=1536, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=1e5,
    rope_scaling=None, max_position_embeddings=8192, bos_token_id=1, eos_token_ids=[2],
    norm_offset=0.0, embed_scale=1.0, logit_scale=1.0, logit_softcap=None,
)  # fmt: skip
DRAFT_VOCABULARY = 8192


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        post_norm: whether `final` went through the verifier's last norm.
    """

    head: VerifierHead
    vocabulary: DraftVocabulary
    aux_layers: tuple[int, ...]
    post_norm: bool
    documents: Sequence[Document]


@dataclass(frozen=True)
class Task:
    """A task read back.

    Attributes:
        config: of the drafter.
        settings: how it is trained.
        data: all documents of the batches.
        held_out: other documents, for the common scorer.
        weights: the drafter's first ones.
        round_steps: optimizer steps of a round.
        round_tokens: packed rows of each round.
    """

    config: DrafterConfig
    settings: TrainSettings
    data: TrainData
    held_out: Sequence[Document]
    weights: dict[str, Tensor]
    embed_VH: Tensor
    round_steps: int
    round_tokens: list[int]

    def drafter(self, weights: dict[str, Tensor]) -> Drafter:
        """A drafter with weights, those that training leaves alone from the start."""
        made = Drafter(self.config, self.embed_VH)
        made.load_state_dict({**self.weights, **weights})
        return made


def made_up(length: int) -> Source:
    """Documents of `length` tokens in which the next token can be learnt from the last one.

    All rows but the first four and the last are supervised, so that no trainer gains by leaving
    rows out.
    """
    draw = generator("bench-train", SEED)
    config = SMALL
    size, vocab = config.hidden_size, config.vocab_size
    rows_VG = torch.randn(vocab, size, generator=draw)
    vocabulary = DraftVocabulary.from_targets(
        torch.randperm(vocab, generator=draw)[:DRAFT_VOCABULARY], vocab
    )
    unit_VG = rows_VG * size**-0.5
    head = VerifierHead(config, unit_VG, torch.ones(size), unit_VG, None)
    alphabet = vocabulary.target_ids[torch.randperm(DRAFT_VOCABULARY, generator=draw)[:ALPHABET]]
    follow = torch.randperm(ALPHABET, generator=draw)
    count = DOCUMENTS + HELD_OUT
    letters = torch.randint(ALPHABET, (count, length), generator=draw)
    expected = torch.rand(count, length, generator=draw) < FOLLOWS
    for t in range(1, length):
        letters[:, t] = torch.where(expected[:, t], follow[letters[:, t - 1]], letters[:, t])
    documents = []
    for index in range(count):
        tokens, awaited = alphabet[letters[index]], alphabet[follow[letters[index]]]
        noise = torch.randn(4, length, size, generator=draw)
        final = (SIGNAL * rows_VG[awaited] + noise[3]).bfloat16()
        aux = torch.stack([SIGNAL * rows_VG[tokens] + noise[i] for i in range(3)], 1)
        mask = torch.ones(length, dtype=torch.uint8)
        mask[:4] = mask[-1:] = 0
        documents.append(
            Document(
                id=str(index), source="made", token_ids=tokens.int(), loss_mask=mask,
                aux=aux.bfloat16(), final=final, verifier_top1=awaited.int(),
                verifier_lse=_lse(final, head),
            )
        )  # fmt: skip
    return Source(head, vocabulary, (1, 14, 26), False, documents)


def real(states: Path, head: Path, vocabulary: Path) -> Source:
    """Documents of a folder that extraction wrote."""
    dataset = StatesDataset.open(states)
    verifier = read_head(head)
    dataset.check(verifier.config)
    return Source(
        verifier,
        read_vocabulary(vocabulary, vocab_size=verifier.config.vocab_size),
        tuple(dataset.meta.aux_layers),
        dataset.meta.final_hidden == "post_norm",
        dataset,
    )


def _lse(final_NG: Tensor, head: VerifierHead) -> Tensor:
    whole = TargetHead(head.lm_head.float(), head.norm.float(), head.config.rms_norm_eps, None)
    return torch.cat([whole.logits(part.float()).logsumexp(-1) for part in final_NG.split(256)])


def write_task(
    folder: Path, source: Source, *, length: int, rounds: int, round_steps: int, lr: float
) -> None:
    """Writes a task of `rounds` rounds; a batch is as many whole documents as fit `length` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [min(len(document.token_ids), length) for document in source.documents]
    chosen, held_out = _choose(lengths, length)
    settings = TrainSettings.model_validate(
        {
            "lr": lr, "scheduler": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0,
            "beta2": 0.999, "clip": 1.0, "batch_tokens": length, "max_length": length,
            "evaluations": 1, "log_every": round_steps, "save_every": 10**9,
            "objective": {"ttt_steps": 3, "step_decay": 1.0},
            "drafter": {"layer_init": "verifier" if source.head.layer else "random"},
        }
    )  # fmt: skip
    steps = rounds * round_steps
    plan = plan_steps(
        [lengths[i] for i in chosen],
        batch_tokens=length, max_length=length, accumulate=1, seed=SEED,
        tokens=steps * length, epochs=None,
    )[:steps]  # fmt: skip
    drafter = new_drafter(source.head, source.vocabulary, source.aux_layers, settings.drafter, SEED)
    documents = [source.documents[i] for i in [*chosen, *held_out]]
    cut = [lengths[i] for i in [*chosen, *held_out]]

    def rows(name: str) -> Tensor:
        parts = zip(documents, cut, strict=True)
        return torch.cat([getattr(document, name)[:end] for document, end in parts])

    save_file(
        {
            "lengths": torch.tensor(cut), "token_ids": rows("token_ids"),
            "loss_mask": rows("loss_mask"), "aux": rows("aux"), "final": rows("final"),
            "top1": rows("verifier_top1"), "lse": rows("verifier_lse"),
        },
        folder / "rows.safetensors",
    )  # fmt: skip
    init = {f"drafter.{name}": value for name, value in drafter.state_dict().items()}
    init |= {
        "embed": drafter.embed_VH,
        "target_rows": head_rows(source.head, source.vocabulary).float(),
    }
    if not source.post_norm:
        init["norm"] = source.head.norm_weight
    save_file(
        {name: value.contiguous() for name, value in init.items()}, folder / "init.safetensors"
    )
    task = {
        "config": drafter.config.model_dump(), "settings": settings.model_dump(),
        "length": length, "round_steps": round_steps,
        "batches": [step.batches[0] for step in plan], "held_out": len(held_out),
        "softcap": source.head.config.logit_softcap,
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task))


def _choose(lengths: Sequence[int], length: int) -> tuple[list[int], list[int]]:
    """Documents to train on and to hold out: as many rows as made-up ones would have."""
    order = packed_order(lengths, length, length, seed=SEED, epoch=0)
    few = order[: DOCUMENTS + HELD_OUT]
    split = len(few) - HELD_OUT
    if split < 1:
        raise SystemExit(f"too few documents for batches of {length} rows")
    return [i for batch in few[:split] for i in batch], [i for batch in few[split:] for i in batch]


def read_task(folder: Path) -> Task:
    """Opens what `write_task` wrote."""
    about: dict[str, Any] = json.loads((folder / "task.json").read_text())
    init = load_file(folder / "init.safetensors")
    rows = load_file(folder / "rows.safetensors")
    lengths = rows.pop("lengths").tolist()
    parts = {name: value.split(lengths) for name, value in rows.items()}
    documents = [
        Document(
            id=str(i), source="bench", token_ids=parts["token_ids"][i],
            loss_mask=parts["loss_mask"][i], aux=parts["aux"][i], final=parts["final"][i],
            verifier_top1=parts["top1"][i], verifier_lse=parts["lse"][i],
        )
        for i in range(len(lengths))
    ]  # fmt: skip
    config = DrafterConfig.model_validate(
        {**about["config"], "aux_layers": tuple(about["config"]["aux_layers"])}
    )
    weights = {
        name.removeprefix("drafter."): value
        for name, value in init.items()
        if name.startswith("drafter.")
    }
    head = TargetHead(init["target_rows"], init.get("norm"), config.rms_norm_eps, about["softcap"])
    batches = about["batches"]
    trained = len(lengths) - about["held_out"]
    vocabulary = DraftVocabulary(weights["d2t"], weights["t2d"])
    return Task(
        config=config,
        settings=TrainSettings.model_validate(about["settings"]),
        data=TrainData(documents[:trained], lengths[:trained], [], head, vocabulary),
        held_out=documents[trained:],
        weights=weights,
        embed_VH=init["embed"],
        round_steps=about["round_steps"],
        round_tokens=[
            sum(
                lengths[i] for batch in batches[start : start + about["round_steps"]] for i in batch
            )
            for start in range(0, len(batches), about["round_steps"])
        ],
    )
