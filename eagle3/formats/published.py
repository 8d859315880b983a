"""Drafters as they lie in a folder, ours and published ones, in EAGLE's or speculators' layout.

Takes the architecture from the checkpoint's own config, brings tensors under our names, and says
what it filled in. A drafter that this harness cannot train is refused, with the value that makes
it so. Knows no training data.

Legend: V vocabulary, D draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.drafter import DrafterConfig
from eagle3.errors import HarnessError
from eagle3.formats.eagle import LAYER_IDS, layer_list, read_eagle_config
from eagle3.formats.published_tensors import (
    EMBEDDING,
    HEAD,
    WHOLE,
    about_embedding,
    fill_vocabulary,
    own_names,
    read_tensors,
    refuse_quantised,
)
from eagle3.layer_ids import from_sglang, from_vllm
from eagle3.reading import read_object
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead

SPECULATORS = "speculators_model_type"


@dataclass(frozen=True)
class Published:
    """A drafter as read.

    Attributes:
        tensors: under our names, `d2t` (offsets) and `t2d` among them, without embedding.
        notes: what was filled in or left out, for the log.
        own_head: it has a head of its own; else the verifier's rows stand among `tensors`.
    """

    config: DrafterConfig
    tensors: dict[str, Tensor]
    notes: list[str]
    own_head: bool


def resolve_drafter(source: str) -> Path:
    """The folder of a drafter; downloads a hub id's first.

    Raises:
        HarnessError: neither a folder here nor to be had from the hub.
    """
    folder = Path(source)
    if folder.is_dir() or source.count("/") != 1 or folder.parent.is_dir():
        if not folder.is_dir():
            raise HarnessError(
                "nothing to start from", where=source,
                rule="a folder with config.json and weights, or a hub id", got="no such folder",
                fix="correct the path; without a drafter to start from, training is from scratch",
            )  # fmt: skip
        return folder
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.bin"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:
        raise HarnessError(
            "the drafter is neither a folder here nor to be had from the hub", where=source,
            rule="a folder with config.json and weights, or a hub id",
            got=(str(error).splitlines() or [type(error).__name__])[0],
            fix="correct the path, or download it elsewhere, whole, and give its folder; "
            "checkpoints/ are made by `make repro`",
        ) from None  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """A drafter's config.json, in whatever layout.

    Raises:
        HarnessError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise HarnessError(
            "not a drafter checkpoint: a file is missing", where=path, rule="config.json", fix=WHOLE
        )
    return read_object(path, fix=WHOLE)


def read_published(
    folder: Path, head: VerifierHead, *, aux_layers: Sequence[int] | None = None
) -> Published:
    """Reads a drafter for a verifier.

    Args:
        aux_layers: post-layer indices that it was trained on, where its config does not say; goes
            over what the config says.

    Raises:
        HarnessError: a kind that is not trained here, or tensors that do not fit its config; sizes
            of another verifier.
    """
    path, values = folder / "config.json", read_config(folder)
    tensors = read_tensors(folder)
    refuse_kinds(values, tensors, where=path)
    notes: list[str] = []
    config = _config(values, tensors, head.config, aux_layers, path, notes)
    fits_verifier(config, head.config, where=path)
    _meant_for(values, head.config, path, notes)
    own = own_names(tensors, folder)
    refuse_quantised(own, folder)
    if EMBEDDING in own:
        notes.append(about_embedding(own.pop(EMBEDDING), head, folder))
    own_head = HEAD in own
    notes += fill_vocabulary(own, config, head, folder)
    return Published(config, own, notes, own_head)


def refuse_kinds(values: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Raises for a draft layer of another kind than the one Llama block over three states."""
    inner = part(values, "transformer_layer_config", where=where) or values
    named = values.get("architectures") or []
    architectures = ", ".join(map(str, named if isinstance(named, list) else [named])) or "none"
    wanted: list[tuple[str, object, object]] = [
        (SPECULATORS, "eagle3", values.get(SPECULATORS, "eagle3")),
        ("num_hidden_layers", 1, inner.get("num_hidden_layers", 1)),
        ("attention_bias", False, bool(inner.get("attention_bias"))),
        ("mlp_bias", False, bool(inner.get("mlp_bias"))),
        ("kv_lora_rank (latent attention)", None, inner.get("kv_lora_rank")),
        ("hidden_act", "silu", inner.get("hidden_act", "silu")),
    ]
    for name, rule, got in wanted:
        if got != rule:
            raise HarnessError(
                "a drafter of a kind that is not trained here",
                where=f"{where}, {name}", rule=rule, got=f"{got} (architecture: {architectures})",
                fix="start from scratch, or from a drafter with one Llama block",
            )  # fmt: skip
    if "fc.weight" not in {name.removeprefix("model.") for name in tensors}:
        raise HarnessError(
            "a drafter of a kind that is not trained here",
            where=where, rule="EAGLE-3: fc.weight over aux hidden states",
            got=f"architecture {architectures}, tensors {', '.join(sorted(tensors)[:6])}",
            fix="start from scratch, or from a drafter for EAGLE-3",
        )  # fmt: skip


def part(values: Mapping[str, Any], name: str, *, where: Path) -> dict[str, Any]:
    """A part of a config that has keys of its own, {} where there is none.

    Raises:
        HarnessError: something else stands there.
    """
    value = values.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise HarnessError(
        "the drafter's config cannot be used",
        where=f"{where}, {name}",
        rule="an object with keys",
        got=f"{type(value).__name__}: {value!r:.80}",
        fix="correct its config.json, or take the key out",
    )


def layers_said(values: Mapping[str, Any], model_type: str, *, where: Path) -> list[int] | None:
    """Post-layer indices that a config names, or None.

    The top-level key counts as transformers' `hidden_states` do, the nested one as SGLang does for
    the verifier's class.

    Raises:
        HarnessError: the two keys mean different layers, or hold no list of whole numbers.
    """
    if values.get("aux_layers") is not None:
        return list(layer_list(values["aux_layers"], where=f"{where}, aux_layers"))
    top = values.get(LAYER_IDS)
    nested = part(values, "eagle_config", where=where).get(LAYER_IDS)
    found = {}
    if top:
        found[LAYER_IDS] = from_vllm(layer_list(top, where=f"{where}, {LAYER_IDS}"))
    if nested:
        name = f"eagle_config.{LAYER_IDS}"
        found[name] = from_sglang(layer_list(nested, where=f"{where}, {name}"), model_type)
    if len({tuple(layers) for layers in found.values()}) > 1:
        raise HarnessError(
            "a drafter's config names different layers to different engines",
            where=where,
            rule="one set of layers",
            got="; ".join(f"{name} means outputs of {layers}" for name, layers in found.items()),
            fix="--drafter-aux-layers with those that it was trained on",
        )
    return next(iter(found.values()), None)


def _config(
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: HeadConfig,
    aux_layers: Sequence[int] | None,
    path: Path,
    notes: list[str],
) -> DrafterConfig:
    layers = (
        list(aux_layers) if aux_layers else layers_said(values, verifier.model_type, where=path)
    )
    if layers is None:
        raise HarnessError(
            "the drafter does not say which layers its aux hidden states come from; engines guess, "
            "each its own way",
            where=path,
            rule=f"{LAYER_IDS}, at the top or in eagle_config",
            fix="--drafter-aux-layers with the outputs of decoder layers that it was trained on",
        )
    if aux_layers:
        notes.append(f"trained on the outputs of layers {layers}, as said")
    flat = _flat(values, path)
    if values.get(SPECULATORS) and "norm_before_residual" not in values:
        raise HarnessError(
            "the drafter's config leaves open what readers take differently", where=path,
            rule="norm_before_residual: true or false, as it was trained", got="no such key",
            fix="add it to its config.json",
        )  # fmt: skip
    return read_eagle_config({**flat, "aux_layers": layers}, where=str(path))


def _flat(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """One level, with RoPE as older configs write it and what everybody leaves out filled in."""
    flat = {**part(values, "transformer_layer_config", where=path), **values}
    rope = dict(part(flat, "rope_parameters", where=path) or part(flat, "rope_scaling", where=path))
    theta = next(
        (t for t in (rope.pop("rope_theta", None), flat.get("rope_theta")) if t is not None),
        10000.0,
    )
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise HarnessError(
            "the drafter's config cannot be used", where=f"{path}, rope_theta", rule="a number",
            got=repr(theta), fix="correct its config.json, as it was trained",
        )  # fmt: skip
    kind = rope.get("rope_type", rope.get("type", "default"))
    flat |= {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else rope}
    flat["draft_vocab_size"] = flat.get("draft_vocab_size") or flat.get("vocab_size")
    flat["num_key_value_heads"] = flat.get("num_key_value_heads") or flat.get("num_attention_heads")
    if type(flat.get("rms_norm_eps")) is int:
        flat["rms_norm_eps"] = float(flat["rms_norm_eps"])
    return flat


def fits_verifier(config: DrafterConfig, verifier: HeadConfig, *, where: object) -> None:
    """Refuses a drafter whose sizes or layers the verifier does not have.

    Raises:
        HarnessError: with both values.
    """
    for name, mine, theirs in (
        ("hidden size", config.target_hidden_size, verifier.hidden_size),
        ("vocabulary", config.vocab_size, verifier.vocab_size),
    ):
        if mine != theirs:
            raise _of_another(name, mine, theirs, verifier, where)
    if min(config.aux_layers) < 0 or max(config.aux_layers) >= verifier.num_hidden_layers:
        raise HarnessError(
            "the drafter reads layers that the verifier does not have",
            where=where,
            rule=f"{verifier.verifier} has layers 0 to {verifier.num_hidden_layers - 1}",
            got=list(config.aux_layers),
            fix="a drafter for this verifier, or the right layers: aux_layers in its config.json, "
            "--drafter-aux-layers to finetune it",
        )


def _of_another(
    name: str, mine: object, theirs: object, verifier: HeadConfig, where: object
) -> HarnessError:
    return HarnessError(
        f"the drafter is for a verifier of another {name}",
        where=where,
        rule=f"{verifier.verifier}: {theirs}",
        got=mine,
        fix="a drafter for this verifier or one like it; or train from scratch",
    )


def _meant_for(
    values: Mapping[str, Any], verifier: HeadConfig, path: Path, notes: list[str]
) -> None:
    """Refuses a drafter for a verifier of another kind; notes one for another of the same kind."""
    spoken = part(values, "verifier", where=path)
    kind = spoken.get("model_type", verifier.model_type)
    if kind != verifier.model_type:
        raise _of_another("kind", kind, verifier.model_type, verifier, path)
    named = part(part(values, "speculators_config", where=path), "verifier", where=path)
    trained_for = spoken.get("name") or named.get("name_or_path")
    if trained_for and trained_for != verifier.verifier:
        notes.append(f"it was trained for {trained_for}, not for {verifier.verifier}")
