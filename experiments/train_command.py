"""`eagle3 train`: the pipeline's training, with the flags of people's training scripts.

Same code, same MLflow run as the train stage; what a flag does not say comes from params.yaml.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from eagle3.arm import arm_settings, init_digest, train_arm
from eagle3.checkpoint import CONFIG, WEIGHTS
from eagle3.conventions import Conventions
from eagle3.dataset import StatesDataset
from eagle3.errors import HarnessError
from eagle3.formats.published import resolve_drafter
from eagle3.machine import keep_freed_memory
from eagle3.ranks import joined
from eagle3.tracking import NullTracker, Tracker, flatten
from eagle3.train_settings import TrainSettings
from eagle3.verifier_head import read_head
from eagle3.workspace import digest, publish, work_folder, write_json
from experiments.evidence import evidence
from experiments.output_folder import check_output
from experiments.project import project_root
from experiments.trained_origin import RECORD, named_inputs, run_name
from experiments.training_checks import check_drafter, refuse_without_answers
from experiments.training_data import (
    States,
    arm_data,
    check_states,
    head_kept_for_resuming,
    input_digests,
    open_foreign_states,
    split,
    tokens_of,
    training_folder,
    vocabulary_of,
)
from experiments.verifier_argument import has_layer, head_of, verifier_of
from stages import notes, provenance
from stages.closure import code_digests
from stages.params import read_params, read_section, section_values
from stages.runner import RunSettings, check_device, set_logging, set_threads
from stages.sending import data_tags
from stages.tracking import MlflowTracker, closing, journal_root, resolve_store

log = logging.getLogger(__name__)

CODE = Path(__file__).parents[1]
SILENT = Conventions()


def run(
    *,
    verifier_path: str,
    data_dir: Path,
    output_dir: Path,
    vocab_mapping_dir: Path | None = None,
    finetune_from: str | None = None,
    epochs: int | None = None,
    tokens: int | None = None,
    lr: float | None = None,
    max_seq_len: int | None = None,
    ttt_steps: int | None = None,
    noise_std: float | None = None,
    val_ratio: float | None = None,
    scheduler: str | None = None,
    warmup_ratio: float | None = None,
    num_workers: int | None = None,
    conventions: Conventions = SILENT,
    drafter_aux_layers: Sequence[int] | None = None,
) -> None:
    """Trains one drafter into `output_dir`; under torchrun, on several processes together.

    Args:
        tokens: budget in packed rows, as an arm's; None trains for `epochs`, or one pass.
        conventions: what is said of hidden states that another program wrote.
        drafter_aux_layers: layers that the drafter to finetune was trained on, if its config is
            silent or wrong.

    Raises:
        HarnessError: any input that cannot be used, before training starts.
    """
    root = project_root()
    set_logging()
    if tokens is not None and epochs is not None:
        raise HarnessError(
            "two budgets", where="--tokens, --epochs", rule="one of them",
            got=f"{tokens} tokens and {epochs} epochs", fix="leave one out",
        )  # fmt: skip
    log.info(
        "from scratch: no --finetune-from"
        if finetune_from is None
        else f"finetune from {finetune_from}"
    )
    if num_workers:
        log.info("--num-workers %d: states are memory-mapped, nothing to read ahead", num_workers)
    params = root / "params.yaml"
    runs = read_section(params, RunSettings, "run")
    set_threads(runs.threads)
    check_device(runs.device)
    keep_freed_memory()
    flags: dict[str, Any] = {
        "lr": lr,
        "max_length": max_seq_len,
        "scheduler": scheduler,
        "warmup_ratio": warmup_ratio,
        "objective": None if ttt_steps is None else {"ttt_steps": ttt_steps},
        "noise": None if noise_std is None else {"kind": "uniform_abs", "std": noise_std},
    }
    settings = _settings(params, flags)
    check_output(output_dir, "--output-dir", {WEIGHTS, CONFIG, RECORD})
    init = None if finetune_from is None else resolve_drafter(finetune_from)
    verifier = verifier_of(verifier_path)
    copies = init is None and settings.drafter.layer_init == "verifier"
    if copies and not has_layer(verifier_path):
        # No flag asked for it: the script of somebody with such a verifier works as it stands.
        log.info(
            "%s has no Llama-like last layer: the draft layer starts random", verifier.verifier
        )
        copies = False
        settings = _settings(params, {**flags, "drafter": {"layer_init": "random"}})
    folder = check_states(data_dir, verifier, conventions)
    digests = input_digests(verifier, data_dir, vocab_mapping_dir, folder)
    if init is not None:
        digests[str(init)] = init_digest(init)
    key: dict[str, Any] = {
        "run": runs.model_dump(),
        "inputs": digests,
        "settings": settings.model_dump(mode="json"),
        "epochs": epochs,
        "tokens": tokens,
        "val_ratio": val_ratio,
        "said": [conventions.model_dump(), drafter_aux_layers],
        "paths": [str(verifier_path), *map(str, (data_dir, vocab_mapping_dir, finetune_from))],
        "output": str(output_dir.resolve()),
    }
    with (
        joined(runs.device) as ranks,
        work_folder(
            root, "train-command", key, leads=ranks.leads, output=output_dir.resolve()
        ) as work,
        head_kept_for_resuming(work) if ranks.leads else contextlib.nullcontext(),
    ):
        ranks.on_leader(lambda: head_of(verifier_path, work, layer=copies).config)  # for all
        head = read_head(work / "head.safetensors")
        states: States
        layers = conventions.aux_layers
        if folder is None:
            states = StatesDataset.open(training_folder(data_dir))
            layers = states.meta.aux_layers
        if init is not None:
            check_drafter(init, head, layers, drafter_aux_layers)
        if folder is not None:
            states = open_foreign_states(
                folder, verifier_path, head, conventions,
                device=runs.device, trust=runs.trust_remote_code,
            )  # fmt: skip
        splits = folder is None and (data_dir / "train").is_dir()
        held_out = None if (data_dir / "dev").is_dir() and splits else val_ratio
        kept, _ = split(states, held_out)
        refuse_without_answers([mask for _, mask in tokens_of(states, kept)], settings.max_length)
        vocabulary = vocabulary_of(vocab_mapping_dir, states, kept, head, params)
        data = arm_data(data_dir, None if splits else states, head, vocabulary, val_ratio)
        given = (verifier_path, data_dir, vocab_mapping_dir, finetune_from)
        named = named_inputs(root, given, digests)
        about = provenance.describe(root, threads=runs.threads, seed=runs.seed)
        code = code_digests(CODE, __name__)
        tags = provenance.as_tags(about) | data_tags(named)
        with _tracked(root, output_dir, key, tags, leads=ranks.leads) as tracker:
            provenance.log_diff(tracker, about)
            tracker.log_params(flatten({**key, **settings.model_dump(), "seed": runs.seed}))
            training = notes.Training(
                name=output_dir.name,
                init=init,
                verifier=data.meta.verifier,
                states=data_dir,
                documents=len(data.lengths),
                budget=notes.budget(tokens, epochs or 1),
                lr=settings.lr,
                ttt_steps=settings.objective.ttt_steps,
            )
            training.tell_begin(tracker)
            result = train_arm(
                work / "head.safetensors" if init is None else init,
                data,
                settings,
                seed=runs.seed,
                tokens=tokens,
                epochs=None if tokens is not None else epochs or 1,
                device=runs.device,
                work=work,
                tracker=tracker,
                init_layers=drafter_aux_layers,
                ranks=ranks,
            )
            training.tell_end(tracker, result, {"checkpoint": output_dir})
        if not ranks.leads:
            return
        record = evidence(
            about,
            inputs=named,
            settings=key["settings"],
            code=code,
            runs=_runs(tracker, run_name(output_dir)),
        )
        best = {"best_step": result.best_step, "best_dev_tau": result.best_tau}
        write_json(work / "checkpoint" / RECORD, {**key, **best, **record})
        publish(work / "checkpoint", output_dir.resolve())
    log.info("drafter: %s", output_dir)


def _settings(params: Path, flags: Mapping[str, Any]) -> TrainSettings:
    """params.yaml's, with the flags that are given over them."""
    shared = section_values(read_params(params), "train", where=params)
    given = {name: value for name, value in flags.items() if value is not None}
    return arm_settings(shared, given, where="flags over params.yaml, train")


def _runs(tracker: Tracker, name: str) -> list[dict[str, str | None]]:
    """The closed run as a record names it; without an id where the store did not answer."""
    if not isinstance(tracker, MlflowTracker):
        return []
    return [{"name": name, "run_id": tracker.run_id(0.0)}]


def _tracked(
    root: Path, output_dir: Path, key: Mapping[str, Any], tags: Mapping[str, str], *, leads: bool
) -> AbstractContextManager[Tracker]:
    """The training's run in MLflow, said by the process that leads."""
    if not leads:
        return contextlib.nullcontext(NullTracker())
    tracker = MlflowTracker(
        resolve_store(root),
        journal_root(root),
        run_name=run_name(output_dir),
        resume_key=f"train-command-{digest(key)[:16]}",
        tags={"kind": "train", "arm": output_dir.name, **tags},
        watch=True,
    )
    return closing(tracker)
