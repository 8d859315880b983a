"""What `eagle3 train`, `import` and `parity` read: hidden states, a draft vocabulary, and digests.

Hidden states are the pipeline's own shards or another program's folder, read where it lies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle3.arm import ArmData, Chosen, open_states
from eagle3.chat import generation_opening
from eagle3.conventions import Conventions, settle
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.foreign import ForeignStates
from eagle3.formats.foreign_states import ForeignFolder, open_foreign
from eagle3.formats.vocab_arrays import read_arrays
from eagle3.reference import spread
from eagle3.seeding import seed_of
from eagle3.verifier import HeadConfig, VerifierSpec
from eagle3.verifier_head import VerifierHead
from eagle3.verifier_model import load_tokenizer
from eagle3.vocab import DraftVocabulary, VocabSettings, build_vocabulary, read_vocabulary
from eagle3.workspace import digest, digest_file
from experiments.training_checks import FOREIGN, OWN, unknown_states
from stages.params import read_section

log = logging.getLogger(__name__)

States = StatesDataset | ForeignStates
VOCABULARY, ARRAYS = "vocab.safetensors", ("d2t.npy", "t2d.npy")


def training_folder(data_dir: Path) -> Path:
    """The training split under a folder, or the folder itself."""
    return data_dir / "train" if (data_dir / "train").is_dir() else data_dir


@contextlib.contextmanager
def head_kept_for_resuming(work: Path) -> Iterator[None]:
    """Leaves no head file behind where there is nothing to take up: it can have gigabytes, half of
    it written when the disk is full too."""
    try:
        yield
    finally:
        if not any(work.glob("state-*")):
            for file in work.glob("head.safetensors*"):
                file.unlink()


def check_states(data_dir: Path, verifier: HeadConfig, said: Conventions) -> ForeignFolder | None:
    """Refuses at once what cannot be used; returns another program's folder, None for our shards.

    Raises:
        HarnessError: nothing to train on there, states of another verifier, or flags for what our
            own shards say themselves.
    """
    folder = open_foreign(data_dir)
    if folder is None:
        if not (training_folder(data_dir) / "index.jsonl").is_file():
            raise unknown_states(data_dir, f"{OWN}, {FOREIGN}")
        StatesDataset.open(training_folder(data_dir)).check(verifier)
        refuse_conventions(data_dir, said)
        return None
    log.info("%s: %d samples of %s, read in place", data_dir, len(folder.paths), folder.kind)
    return folder


def refuse_conventions(data_dir: Path, said: Conventions) -> None:
    """Raises for flags that say of our own shards what they say themselves."""
    if said != Conventions():
        raise HarnessError(
            "these hidden states say themselves what they are",
            where=data_dir, rule="no --aux-layers, --final-hidden, --mask-alignment, "
            "--padding-rows for the pipeline's own states", got=said.model_dump(),
            fix="leave them out",
        )  # fmt: skip


def open_foreign_states(
    folder: ForeignFolder,
    verifier_path: str,
    head: VerifierHead,
    said: Conventions,
    *,
    device: str,
    trust: bool,
    most: int | None = None,
) -> ForeignStates:
    """Another program's folder with its conventions settled.

    Args:
        trust: whether the verifier's own code may run, to read its chat template.
        most: samples to open, evenly out of all; None: all of them.
    """
    opening, why_not = answer_opening(verifier_path, trust=trust)
    settled = settle(folder, head, said, opening, why_not)
    if most is not None:
        folder = folder.only(spread(len(folder.paths), most))
    return ForeignStates(folder, head, settled, device=device)


def answer_opening(verifier_path: str, *, trust: bool) -> tuple[list[int] | None, str]:
    """Token ids with which the verifier's chat template opens an answer, or None and why not."""
    if Path(verifier_path).is_file():
        return None, "--verifier-path is a head file, which has no tokenizer"
    try:
        spec = VerifierSpec.open(verifier_path, trust_remote_code=trust)
        return generation_opening(load_tokenizer(spec)), ""
    except HarnessError as error:
        log.info("no chat template to check the loss mask by: %s", error)
        return None, "; ".join(line.strip() for line in str(error).split("\n"))


def vocabulary_of(
    folder: Path | None, states: States, kept: Sequence[int], head: VerifierHead, params: Path
) -> DraftVocabulary:
    """The mapping given, or one made from supervised tokens.

    Args:
        kept: samples to count in: those that are trained on, none held out.
    """
    size = head.config.vocab_size
    if folder is None:
        wanted = read_section(params, VocabSettings, "vocab").size or size
        counts = torch.zeros(size, dtype=torch.int64)
        for ids, mask in tokens_of(states, kept):
            counts += torch.bincount(ids[mask.bool()].long(), minlength=size)
        log.info("no --vocab-mapping-dir: %d draft tokens chosen from the data", wanted)
        return build_vocabulary(counts, wanted, head.config.eos_token_ids)
    file = folder if folder.is_file() else folder / VOCABULARY
    given = read_vocabulary(file, vocab_size=size) if file.is_file() else read_arrays(folder, size)
    if ends := [end for end in head.config.eos_token_ids if end < size and not given.t2d[end]]:
        log.warning("%s cannot draft token %s, which ends an answer", folder, ends)
    return given


def tokens_of(states: States, kept: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and masks of samples; their states are not read."""
    for index in kept:
        if isinstance(states, ForeignStates):  # without its states: those are most of the bytes
            yield states.tokens(index)
        else:
            document = states[index]
            yield document.token_ids, document.loss_mask


def arm_data(
    data_dir: Path,
    states: States | None,
    head: VerifierHead,
    vocabulary: DraftVocabulary,
    val_ratio: float | None,
) -> ArmData:
    """train/ and dev/ under a folder, or one folder split by sample id.

    Args:
        states: the folder, opened; None for one with splits in it.
    """
    if states is None:
        data = open_states(data_dir, head, vocabulary)
        if data.dev:
            if val_ratio:
                log.info("--val-ratio is not used: %s has a dev split", data_dir)
            return data
        states = StatesDataset.open(data_dir / "train")
    kept, held = split(states, val_ratio)
    masks = (mask for _, mask in tokens_of(states, held))
    dev = [index for index, mask in zip(held, masks, strict=True) if _one_answer(mask)]
    if len(dev) < len(held):
        log.info("%d held out samples have several answers: no τ by replay", len(held) - len(dev))
    log.info("%d samples to train on, %d held out", len(kept), len(held))
    lengths = [states.lengths[index] for index in kept]
    return ArmData(
        states.meta, Chosen(states, kept), lengths, Chosen(states, dev), head, vocabulary
    )


def split(states: States, val_ratio: float | None) -> tuple[list[int], list[int]]:
    """Indices to train on and held out: a property of each sample's id.

    Raises:
        HarnessError: all are held out.
    """
    share = val_ratio or 0.0
    held = [
        index
        for index, name in enumerate(states.ids)
        if seed_of("validation", name) / 2**63 < share
    ]
    if len(held) == len(states):
        raise HarnessError(
            "no sample is left to train on", where=f"--val-ratio {share}",
            rule="one sample or more that is not held out", got=f"{len(held)} held out of as many",
            fix="a smaller --val-ratio, or more samples",
        )  # fmt: skip
    out = set(held)
    return [index for index in range(len(states)) if index not in out], held


def _one_answer(mask: torch.Tensor) -> bool:
    """Whether supervised tokens are one run, as replay wants them.

    Args:
        mask: u8[T], 1 where a token is supervised.
    """
    marked = mask.nonzero()[:, 0]
    return bool(len(marked)) and int(marked[-1] - marked[0]) + 1 == len(marked)


def input_digests(
    verifier: HeadConfig, data_dir: Path, vocabulary: Path | None, folder: ForeignFolder | None
) -> dict[str, str]:
    """What a killed run is taken up under: the same inputs by content, not by path.

    Of another program's samples, names, sizes and times stand for the content: a terabyte is not
    read for it.
    """
    files = sorted({*data_dir.glob("*/index.jsonl"), *data_dir.glob("index.jsonl")})
    if vocabulary is not None:
        # Of a folder what is read of it: it may be that of the data, with a terabyte in it.
        files += [vocabulary, *(vocabulary / name for name in (VOCABULARY, *ARRAYS))]
    found = {str(path): digest_file(path) for path in files if path.is_file()}
    if folder is not None:
        try:
            stats = [(path.name, path.stat()) for path in folder.paths]
        except FileNotFoundError as error:
            raise HarnessError(
                "a file of hidden states is not there", where=error.filename,
                rule="a file, or a link to one", got="a link to nothing",
                fix="remove the link, or bring back what it leads to",
            ) from None  # fmt: skip
        found["samples"] = digest([[n, s.st_size, s.st_mtime_ns] for n, s in stats])
    if isinstance(verifier, VerifierSpec):
        found[verifier.source] = verifier.revision
    return {**found, "verifier": verifier.config_hash}
