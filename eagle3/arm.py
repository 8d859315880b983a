"""One arm of a comparison: its data, its first weights, its training, its checkpoint.

What the pipeline's train stage and the command line share. An arm starts from a verifier head file
(from scratch) or from a checkpoint folder (finetuned).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from pydantic import Field, PositiveInt, model_validator

from eagle3.checkpoint import save_drafter
from eagle3.dataset import Document, StatesDataset, StatesMeta
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.formats.published_tensors import weight_files
from eagle3.initialise import from_checkpoint, head_rows, new_drafter
from eagle3.layer_ids import sglang_layer_ids
from eagle3.loss import TargetHead
from eagle3.ranks import ALONE, Ranks
from eagle3.settings import Settings, merged, read_settings
from eagle3.tracking import Tracker
from eagle3.train_settings import TrainSettings
from eagle3.train_step import TrainData
from eagle3.trainer import TrainResult, train
from eagle3.verifier_head import VerifierHead
from eagle3.vocab import DraftVocabulary
from eagle3.workspace import digest, digest_file

log = logging.getLogger(__name__)


class ArmSettings(Settings):
    """One entry of `arms`.

    init: verifier head file (from scratch) or checkpoint folder (finetune): the pipeline's own or a
        published one, in EAGLE's or speculators' layout.
    init_layers: outputs of decoder layers that a published one was trained on, where its config
        does not say or is wrong.
    states: folder with `train` and `dev` datasets.
    head, vocab: of the verifier that is learnt.
    tokens, epochs: training budget in packed rows, or in passes over the data; one of them.
    train: keys of the `train` section that differ for this arm, nested as there.
    """

    init: str
    init_layers: list[int] | None = None
    states: str
    head: str
    vocab: str
    tokens: PositiveInt | None = None
    epochs: PositiveInt | None = None
    train: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_budget(self) -> ArmSettings:
        if (self.tokens is None) == (self.epochs is None):
            raise ValueError("give tokens or epochs, one of them")
        return self


def arm_settings(
    shared: Mapping[str, Any], changes: Mapping[str, Any], *, where: str
) -> TrainSettings:
    """The `train` section with an arm's own keys over it.

    Raises:
        HarnessError: an unknown key, or a value of the wrong type or range.
    """
    return read_settings(TrainSettings, merged(shared, changes), where=where)


class Chosen(Sequence[Document]):
    """Some documents of a data set, read when they are asked for."""

    def __init__(self, documents: Sequence[Document], indices: Sequence[int]) -> None:
        self._documents, self._indices = documents, list(indices)

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return Chosen(self._documents, self._indices[index])
        return self._documents[self._indices[index]]


@dataclass(frozen=True)
class ArmData:
    """What an arm learns from.

    Attributes:
        lengths: rows of each training document.
        dev: for τ by replay; may be empty.
    """

    meta: StatesMeta
    documents: Sequence[Document]
    lengths: Sequence[int]
    dev: Sequence[Document]
    head: VerifierHead
    vocabulary: DraftVocabulary

    def as_train_data(self) -> TrainData:
        """The same as the training loop takes it."""
        config = self.head.config
        post_norm = self.meta.final_hidden == "post_norm"
        target = TargetHead(
            rows_DG=head_rows(self.head, self.vocabulary).float(),
            norm_G=None if post_norm else self.head.norm_weight,
            eps=config.rms_norm_eps,
            softcap=config.logit_softcap,
        )
        return TrainData(self.documents, self.lengths, self.dev, target, self.vocabulary)


def open_states(folder: Path, head: VerifierHead, vocabulary: DraftVocabulary) -> ArmData:
    """Opens `train` and, if there, `dev` under a folder and checks them against the verifier.

    Raises:
        HarnessError: no training states, or states of another verifier.
    """
    train_set = StatesDataset.open(folder / "train")
    train_set.check(head.config)
    dev: Sequence[Document] = []
    if (folder / "dev").is_dir():
        dev_set = StatesDataset.open(folder / "dev")
        dev_set.check(head.config)
        dev = dev_set
    return ArmData(train_set.meta, train_set, train_set.lengths, dev, head, vocabulary)


def init_digest(init: Path) -> str:
    """SHA-256 of the weights that an arm starts from: of a head file, or in a checkpoint folder.

    Raises:
        HarnessError: there is nothing at `init`.
    """
    files = weight_files(init) if init.is_dir() else [init]
    file = files[0]
    if not file.is_file():
        raise HarnessError(
            "nothing to start from",
            where=file,
            rule="a verifier head file (from scratch) or a checkpoint folder (finetune)",
            fix="correct the path, or run what makes it first",
        )
    return digest_file(file) if len(files) == 1 else digest([digest_file(one) for one in files])


def first_drafter(
    init: Path,
    data: ArmData,
    settings: TrainSettings,
    seed: int,
    init_layers: Sequence[int] | None = None,
) -> Drafter:
    """The drafter that training starts from.

    Args:
        init_layers: layers that the checkpoint at `init` was trained on, if its config is silent.

    Raises:
        HarnessError: it does not fit verifier, data or vocabulary, or reads layers that it could
            not be served with.
    """
    layers = tuple(data.meta.aux_layers)
    sglang_layer_ids(layers, data.head.config.model_type)  # or saving it would be refused
    if init.is_dir():
        log.info("finetuning from %s", init)
        return from_checkpoint(init, data.head, data.vocabulary, layers, init_layers)
    log.info("training from scratch (layer: %s)", settings.drafter.layer_init)
    return new_drafter(data.head, data.vocabulary, layers, settings.drafter, seed)


def train_arm(
    init: Path,
    data: ArmData,
    settings: TrainSettings,
    *,
    seed: int,
    tokens: int | None,
    epochs: int | None,
    device: str,
    work: Path,
    tracker: Tracker,
    init_layers: Sequence[int] | None = None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Trains and leaves the best checkpoint by dev τ in `work/checkpoint`, weights in float32.

    All ranks call it alike; the checkpoint is there when the first of them returns.
    """
    drafter = first_drafter(init, data, settings, seed, init_layers)
    result = train(
        drafter,
        data.as_train_data(),
        settings,
        seed=seed,
        tokens=tokens,
        epochs=epochs,
        device=torch.device(device),
        work=work,
        tracker=tracker,
        ranks=ranks,
    )
    folder, config = work / "checkpoint", data.head.config
    ranks.on_leader(lambda: save_drafter(folder, drafter, config, torch.float32))
    log.info(
        "kept step %d of %d%s",
        result.best_step,
        result.steps,
        "" if result.best_tau is None else f", dev τ {result.best_tau:.4f}",
    )
    return result
