"""`eagle3 plan`: what a run will take, said before any of it is spent. Loads no weight."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.arm import ArmSettings, arm_settings
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings, choose_layers
from eagle3.layer_ids import RAW_LAYER_IDS, sglang_layer_ids, vllm_ids
from eagle3.planning import (
    GIB,
    Estimate,
    PlanSettings,
    Shape,
    Task,
    estimate,
    warnings,
)
from eagle3.reading import read_lines
from eagle3.settings import read_settings
from eagle3.train_settings import TrainSettings
from eagle3.verifier import VerifierSpec
from experiments.settings_check import check_settings
from stages.fitting import check_fits
from stages.params import overlaid, read_params, read_yaml


def run(root: Path, overlay: Path | None) -> None:
    """Prints the plan of params.yaml, or of an overlay on it.

    Raises:
        HarnessError: settings that no run would take, or a verifier of unknown shape.
    """
    base = read_params(root / "params.yaml")
    where = "params.yaml" if overlay is None else f"{overlay} over params.yaml"
    params = base if overlay is None else overlaid(base, read_yaml(overlay), where=overlay)
    check_settings(params, where)
    print("\n".join(describe(params, root, where)))


def describe(params: Mapping[str, Any], root: Path, where: str) -> list[str]:
    """The plan as lines of text."""
    settings = read_settings(PlanSettings, params["plan"], where=f"{where}, plan")
    name, shape, spec = _verifier(params, settings, root, where)
    if spec is not None:
        check_fits(params, spec, where=where)
    extract, train, layers = _read(params, shape, where)
    task = task_of(params, shape, where, root)
    found = estimate(task)
    free = float(shutil.disk_usage(root).free)
    stored: str = extract.dtype if extract.dtype != "float16" else "bfloat16"
    if extract.codec != "none":
        stored = extract.codec
    said = warnings(task, found, free=free, device_memory=_device(params), stored=stored)
    said += _misfits(shape, train)
    return [
        f"plan of {where}",
        f"verifier: {name} ({shape.model_type}), {shape.num_hidden_layers} layers of "
        f"{shape.hidden_size}, {shape.vocab_size:,} tokens",
        f"aux states: outputs of decoder layers {layers}; SGLang's ids "
        f"{sglang_layer_ids(layers, shape.model_type)}, vLLM's {vllm_ids(layers)}",
        *_lines(task, found, given=bool(params["regenerate"].get("keep_given"))),
        *(f"WARNING: {line}" for line in said),
    ]


def _read(
    params: Mapping[str, Any], shape: Shape, where: str
) -> tuple[ExtractSettings, TrainSettings, list[int]]:
    extract = read_settings(ExtractSettings, params["extract"], where=f"{where}, extract")
    layers = choose_layers(extract.aux_layers, shape.num_hidden_layers, where="extract")
    return extract, arm_settings(params["train"], {}, where=f"{where}, train"), layers


def _verifier(
    params: Mapping[str, Any], settings: PlanSettings, root: Path, where: str
) -> tuple[str, Shape, VerifierSpec | None]:
    """Name and shape: from the configuration if it is on this machine, else as stated."""
    source = params["verifier"].get("source")
    folder = root / "data" / "verifier" if source is None else Path(source)
    name = source or params["verifier"]["package"]["name"]
    if not (folder / "config.json").is_file():
        if settings.shape is None:
            raise HarnessError(
                "the verifier's configuration is not on this machine",
                where=f"{where}, verifier",
                rule="a folder with config.json, or its sizes under plan.shape",
                got=str(folder if source is None else source),
                fix="state plan.shape, or run `dvc repro verifier` first"
                if source is None
                else "state plan.shape, or download its config.json into a folder and give that",
            )
        return name, settings.shape, None
    spec = VerifierSpec.open(folder)
    shape = Shape(**{field: getattr(spec, field) for field in Shape.model_fields})
    stated = settings.shape
    if stated is not None and stated != shape and source is not None:
        differing = [f for f in Shape.model_fields if getattr(stated, f) != getattr(shape, f)]
        raise HarnessError(
            "the stated shape is not the verifier's", where=f"{where}, plan.shape",
            rule=", ".join(f"{f}: {getattr(shape, f)}" for f in differing),
            got=", ".join(str(getattr(stated, f)) for f in differing),
            fix="plan.shape: null",
        )  # fmt: skip
    return name, shape, spec


def task_of(params: Mapping[str, Any], shape: Shape, where: str, root: Path = Path()) -> Task:
    """The run in numbers, for a verifier of this shape.

    Args:
        root: where a relative `prompts.source` begins.

    Raises:
        HarnessError: settings that cannot be used, or an unknown number of prompts.
    """
    settings = read_settings(PlanSettings, params["plan"], where=f"{where}, plan")
    _, train, layers = _read(params, shape, where)
    arms = {
        name: read_settings(ArmSettings, values, where=f"arms.{name}")
        for name, values in params["arms"].items()
    }
    wanted = train.drafter
    drafter = shape.model_copy(
        update={
            "intermediate_size": wanted.intermediate_size or shape.intermediate_size,
            "num_attention_heads": wanted.num_attention_heads or shape.num_attention_heads,
            "num_key_value_heads": wanted.num_key_value_heads or shape.num_key_value_heads,
            "head_dim": wanted.head_dim or shape.head_dim,
        }
    )
    return Task(
        verifier=shape,
        samples=_samples(params, root, where),
        dev_share=params["prompts"]["dev_share"],
        prompt_tokens=settings.prompt_tokens,
        response_tokens=min(
            settings.response_tokens, float(params["regenerate"]["max_new_tokens"])
        ),
        max_length=train.max_length,
        aux_layers=len(layers),
        draft_vocabulary=params["vocab"].get("size") or shape.vocab_size,
        drafter=drafter,
        ttt_steps=train.objective.ttt_steps,
        batch_rows=max(train.batch_tokens, 1),
        trained_head=train.drafter.head != "frozen",
        budgets={name: arm.tokens for name, arm in arms.items()},
        epochs={name: arm.epochs for name, arm in arms.items()},
        speeds={
            "generate": settings.generate_tokens_per_s,
            "extract": settings.extract_tokens_per_s,
            "train": settings.train_tokens_per_s,
            **(
                {"decode": settings.decode_tokens_per_s}
                if settings.decode_tokens_per_s is not None
                else {}
            ),
        },
        writes=params["prompts"].get("source") is None,
        test_prompts=settings.test_prompts,
        decoded=params["evaluate"]["decode_prompts"] * params["evaluate"]["decode_tokens"],
    )


def _samples(params: Mapping[str, Any], root: Path, where: str) -> int:
    """Training and dev documents, at most: lines that are held out or twice count as well."""
    source, count = params["prompts"].get("source"), params["prompts"]["count"]
    limit = params["regenerate"].get("limit")
    file = root / source if source is not None else None
    lines = sum(1 for _ in read_lines(file)) if file is not None and file.is_file() else None
    known = [number for number in (count, limit, lines) if number is not None]
    if not known:
        raise HarnessError(
            "the number of prompts is unknown",
            where=f"{where}, prompts",
            rule="prompts.count or regenerate.limit, or a .jsonl file that is here as source",
            got=f"count null, limit null, source {source}",
            fix="state prompts.count",
        )
    return min(known)


def _device(params: Mapping[str, Any]) -> float | None:
    """Bytes of the training device, where it is here."""
    if params["run"]["device"] == "cpu":
        import psutil

        return float(psutil.virtual_memory().total)
    import torch

    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)


def _misfits(shape: Shape, train: TrainSettings) -> list[str]:
    """Settings that training would refuse, or engines would not serve."""
    said = []
    if shape.model_type in RAW_LAYER_IDS:
        if train.drafter.layer_init == "verifier":
            said.append(
                "train.drafter.layer_init: verifier will be refused: this verifier's layers have "
                "latent attention and experts; set it to random"
            )
        if train.drafter.rope_theta is None:
            said.append(
                "train.drafter.rope_theta: null gives the drafter the verifier's scaled RoPE, "
                "which a draft layer does not run; state a base, as published drafters do"
            )
    return said


def _lines(task: Task, found: Estimate, *, given: bool) -> list[str]:
    lines = [
        f"data: {task.samples:,} samples, {found.tokens:,} tokens, {found.supervised:,} supervised "
        f"({task.prompt_tokens:,.0f} + {task.response_tokens:,.0f} a sample, as stated)",
        "hidden states on disk:",
    ]
    lines += [
        f"  {name}: {found.token_bytes[name]:,} bytes a token, {size / GIB:,.1f} GiB"
        f"{' (extract.codec)' if name == 'fp8' else ''}"
        for name, size in found.disk.items()
    ]
    lines += [
        f"verifier head file: {found.head_file / GIB:,.2f} GiB",
        f"drafter: {found.trained / 1e6:,.1f} million trained parameters, checkpoint "
        f"{found.checkpoint / GIB:,.2f} GiB, a resume state {found.resume / GIB:,.2f} GiB",
        f"memory of training, {task.batch_rows:,} rows and {task.ttt_steps} TTT steps:",
    ]
    lines += [f"  {name}: {size / GIB:,.2f} GiB" for name, size in found.memory.items()]
    lines += [
        f"  together: {sum(found.memory.values()) / GIB:,.2f} GiB",
        "hours, at the stated speeds:",
    ]
    remarks = {
        "prompts": "" if task.writes else " (given, not written)",
        "responses": " (less those given with the prompts)" if given else "",
    }
    lines += [
        f"  {name}: {hours:,.2f}{remarks.get(name, '')}" for name, hours in found.hours.items()
    ]
    unknown = [
        name
        for name, value in (
            ("test_prompts", task.test_prompts),
            ("decode_tokens_per_s", task.speeds.get("decode")),
        )
        if value is None
    ]
    if unknown:
        lines.append(
            f"  evaluation{'' if task.test_prompts else ' and test responses'}: not counted, "
            f"{' and '.join(f'plan.{name}' for name in unknown)} not stated"
        )
    return lines
