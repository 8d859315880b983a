"""`eagle3 train`: the pipeline's training, with the flags of people's training scripts.

Same code, same MLflow run as the train stage; what a flag does not say comes from params.yaml.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3.arm import ArmData, arm_settings, init_digest, open_states, train_arm
from eagle3.checkpoint import CONFIG, WEIGHTS
from eagle3.dataset import Document, StatesDataset
from eagle3.errors import HarnessError
from eagle3.machine import keep_freed_memory
from eagle3.seeding import seed_of
from eagle3.tracking import flatten
from eagle3.verifier import HeadConfig, VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.vocab import (
    DraftVocabulary,
    VocabSettings,
    build_vocabulary,
    read_vocabulary,
)
from eagle3.workspace import digest, digest_file, publish, work_folder, write_json
from experiments.cli import project_root
from stages import provenance
from stages.params import read_params, read_section, section_values
from stages.runner import RunSettings, set_logging, set_threads
from stages.signals import ignore_stop_signals, stop_on_signals
from stages.tracking import MlflowTracker, journal_root, resolve_store

log = logging.getLogger(__name__)


def run(
    *,
    verifier_path: str,
    data_dir: Path,
    vocab_mapping_dir: Path | None,
    output_dir: Path,
    finetune_from: Path | None,
    epochs: int | None,
    lr: float | None,
    max_seq_len: int | None,
    ttt_steps: int | None,
    noise_std: float | None,
    val_ratio: float | None,
    scheduler: str | None,
    warmup_ratio: float | None,
    num_workers: int | None,
) -> None:
    """Trains one drafter into `output_dir`.

    Raises:
        HarnessError: any input that cannot be used, before training starts.
    """
    root = project_root()
    set_logging()
    log.info(
        "from scratch: no --finetune-from"
        if finetune_from is None
        else f"finetune from {finetune_from}"
    )
    if num_workers:
        log.info("--num-workers %d: states are memory-mapped, nothing to read ahead", num_workers)
    runs = read_section(root / "params.yaml", RunSettings, "run")
    set_threads(runs.threads)
    keep_freed_memory()
    flags: dict[str, Any] = {
        "lr": lr,
        "max_length": max_seq_len,
        "scheduler": scheduler,
        "warmup_ratio": warmup_ratio,
        "objective": None if ttt_steps is None else {"ttt_steps": ttt_steps},
        "noise": None if noise_std is None else {"kind": "uniform_abs", "std": noise_std},
    }
    changes = {name: value for name, value in flags.items() if value is not None}
    shared = section_values(read_params(root / "params.yaml"), "train", where=root / "params.yaml")
    settings = arm_settings(shared, changes, where="flags over params.yaml, train")
    _check_output(output_dir)
    verifier = _verifier(verifier_path)
    StatesDataset.open(_training_folder(data_dir)).check(verifier)
    key = {
        "run": runs.model_dump(),
        "inputs": _digests(verifier, data_dir, vocab_mapping_dir, finetune_from),
        "settings": settings.model_dump(mode="json"),
        "epochs": epochs,
        "val_ratio": val_ratio,
        "paths": [str(verifier_path), *map(str, (data_dir, vocab_mapping_dir, finetune_from))],
        "output": str(output_dir.resolve()),
    }
    with work_folder(root, "train-command", key) as work:
        head = _head(verifier_path, work)
        vocabulary = _vocabulary(vocab_mapping_dir, data_dir, head, root)
        data = _data(data_dir, head, vocabulary, val_ratio)
        tracker = MlflowTracker(
            resolve_store(root),
            journal_root(root),
            run_name=f"train {output_dir.name}",
            resume_key=f"train-command-{digest(key)[:16]}",
            tags={"kind": "train", "arm": output_dir.name},
        )
        tracker.log_params(flatten({**key, **settings.model_dump(), "seed": runs.seed}))
        status = "FAILED"
        try:
            stop_on_signals()
            result = train_arm(
                finetune_from if finetune_from is not None else work / "head.safetensors",
                data,
                settings,
                seed=runs.seed,
                tokens=None,
                epochs=epochs or 1,
                device=runs.device,
                work=work,
                tracker=tracker,
            )
            status = "FINISHED"
        except KeyboardInterrupt:
            ignore_stop_signals()
            status = "KILLED"
            log.info("stopped; the same command takes up what is finished")
            raise
        finally:
            if not any(work.glob("state-*")):  # nothing to take up, so nothing to keep
                (work / "head.safetensors").unlink(missing_ok=True)
            tracker.close(status)
        about = provenance.describe(root, threads=runs.threads)
        write_json(
            work / "checkpoint" / "provenance.json",
            {**about, "best_step": result.best_step, "best_dev_tau": result.best_tau, **key},
        )
        publish(work / "checkpoint", output_dir.resolve())
    log.info("drafter: %s", output_dir)


def _check_output(output_dir: Path) -> None:
    """A finished checkpoint replaces what stands at its place, which must be one or nothing."""
    if output_dir.is_dir():
        checkpoint = {WEIGHTS, CONFIG, "provenance.json"}
        others = sorted({path.name for path in output_dir.iterdir()} - checkpoint)
        if others:
            raise HarnessError(
                "--output-dir holds other files, which the checkpoint would replace",
                where=output_dir,
                rule="a new folder, an empty one, or an earlier checkpoint",
                got=", ".join(others[:5]),
                fix=f"--output-dir {output_dir / 'drafter'}",
            )
    elif output_dir.exists():
        raise HarnessError("--output-dir is a file", where=output_dir, rule="a folder")
    above = next(folder for folder in output_dir.resolve().parents if folder.is_dir())
    if not os.access(above, os.W_OK):
        raise HarnessError(
            "--output-dir cannot be written",
            where=above,
            rule="a folder with the right to write",
            fix="another --output-dir",
        )


def _verifier(verifier_path: str) -> HeadConfig:
    if Path(verifier_path).is_file():
        return read_head(Path(verifier_path)).config
    return VerifierSpec.open(verifier_path)


def _digests(
    verifier: HeadConfig, data_dir: Path, vocabulary: Path | None, init: Path | None
) -> dict[str, str]:
    """What a killed run is taken up under: the same inputs by content, not by path."""
    files = sorted({*data_dir.glob("*/index.jsonl"), *data_dir.glob("index.jsonl")})
    if vocabulary is not None:
        files += [vocabulary] if vocabulary.is_file() else sorted(vocabulary.glob("*.*"))
    found = {str(path): digest_file(path) for path in files if path.is_file()}
    if init is not None:
        found[str(init)] = init_digest(init)
    if isinstance(verifier, VerifierSpec):
        found[verifier.source] = verifier.revision
    return {**found, "verifier": verifier.config_hash}


def _head(verifier_path: str, work: Path) -> VerifierHead:
    """From a verifier, or from a head file that the pipeline wrote."""
    path = work / "head.safetensors"
    if Path(verifier_path).is_file():
        path.unlink(missing_ok=True)
        path.symlink_to(Path(verifier_path).resolve())
    else:
        write_head(VerifierSpec.open(verifier_path), path)
    return read_head(path)


def _training_folder(data_dir: Path) -> Path:
    return data_dir / "train" if (data_dir / "train").is_dir() else data_dir


def _vocabulary(
    folder: Path | None, data_dir: Path, head: VerifierHead, root: Path
) -> DraftVocabulary:
    """The mapping given, or one made from the data's supervised tokens."""
    size = head.config.vocab_size
    if folder is None:
        wanted = read_section(root / "params.yaml", VocabSettings, "vocab").size or size
        counts = torch.zeros(size, dtype=torch.int64)
        for document in StatesDataset.open(_training_folder(data_dir)):
            ids = document.token_ids[document.loss_mask.bool()].long()
            counts += torch.bincount(ids, minlength=size)
        log.info("no --vocab-mapping-dir: %d draft tokens chosen from the data", wanted)
        return build_vocabulary(counts, wanted, head.config.eos_token_ids)
    if folder.is_file():
        return read_vocabulary(folder, vocab_size=size)
    if (folder / "vocab.safetensors").is_file():
        return read_vocabulary(folder / "vocab.safetensors", vocab_size=size)
    return _from_arrays(folder, size)


def _from_arrays(folder: Path, size: int) -> DraftVocabulary:
    """d2t.npy and t2d.npy of an earlier run; d2t as offsets or as token ids, told apart by t2d."""
    arrays = {}
    for name in ("d2t", "t2d"):
        path = folder / f"{name}.npy"
        if not path.is_file():
            raise HarnessError(
                "no vocabulary mapping", where=folder, rule="d2t.npy and t2d.npy", got="no " + name
            )
        arrays[name] = _array(path)
    d2t, t2d = arrays["d2t"].long(), arrays["t2d"].bool()
    targets = t2d.nonzero()[:, 0]
    if len(t2d) != size:
        raise HarnessError(
            "vocabulary mapping of another verifier",
            where=folder / "t2d.npy",
            rule=f"{size} tokens",
            got=len(t2d),
        )
    for offsets in (d2t, d2t - torch.arange(len(d2t))):
        if torch.equal(offsets + torch.arange(len(d2t)), targets):
            return DraftVocabulary(d2t=offsets, t2d=t2d)
    raise HarnessError(
        "d2t and t2d disagree",
        where=folder,
        rule="d2t holds t2d's tokens in ascending order, as offsets or as token ids",
    )


def _array(path: Path) -> torch.Tensor:
    """A vector of whole numbers or booleans; nothing is unpickled."""
    rule = "a NumPy array of one axis, whole numbers or booleans, without pickled objects"
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise HarnessError(
            "a vocabulary mapping cannot be read", where=path, rule=rule, got=error
        ) from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iub":
        got = (
            f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive"
        )
        raise HarnessError("a vocabulary mapping cannot be used", where=path, rule=rule, got=got)
    return torch.from_numpy(array)


def _data(
    data_dir: Path, head: VerifierHead, vocabulary: DraftVocabulary, val_ratio: float | None
) -> ArmData:
    """train/ and dev/ under a folder, or one folder split by sample id."""
    if (data_dir / "train").is_dir():
        data = open_states(data_dir, head, vocabulary)
        if data.dev and val_ratio:
            log.info("--val-ratio is not used: %s has a dev split", data_dir)
            return data
        if data.dev:
            return data
        documents: Sequence[Document] = data.documents
        meta = data.meta
    else:
        opened = StatesDataset.open(data_dir)
        opened.check(head.config)
        documents, meta = opened, opened.meta
    held = [
        i
        for i, document in enumerate(documents)
        if seed_of("validation", document.id) / 2**63 < (val_ratio or 0.0)
    ]
    out = set(held)
    kept = [document for i, document in enumerate(documents) if i not in out]
    dev = [documents[i] for i in held]
    log.info("%d samples to train on, %d held out", len(kept), len(dev))
    lengths = [len(document.token_ids) for document in kept]
    return ArmData(meta, kept, lengths, dev, head, vocabulary)
