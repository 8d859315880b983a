"""The verifier: its configuration, its weights by role, its model and tokenizer.

The only place that unwraps nested configurations and resolves weight names; everything else takes
a `VerifierSpec`, a `VerifierHead` or the loaded model. Knows nothing of drafters or of data.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from eagle3.errors import HarnessError
from eagle3.reading import open_tensors, read_object
from eagle3.settings import Settings, read_settings
from eagle3.weight_keys import WeightKeys, find_keys
from eagle3.workspace import digest

NESTED = ("text_config", "llm_config", "language_config")
# Families whose RMSNorm multiplies by (1 + w), and those that scale embeddings by sqrt(H).
OFFSET_NORMS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma"),
    *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
SQRT_EMBEDDINGS = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
    *("recurrent_gemma", "vaultgemma"),
)
INDEX = "model.safetensors.index.json"
WHOLE_FOLDER = "download or save the verifier again, whole"
SINGLE = ("model.safetensors", "consolidated.safetensors")


class HeadConfig(Settings):
    """What training has to know of a verifier, flat, whatever its own configuration looks like.

    `norm_offset` is added to norm weights (1.0 for Gemma), `embed_scale` multiplies embedding
    rows, `logit_scale` multiplies logits, `logit_softcap` c (if any) turns them into
    c·tanh(logits/c).
    """

    verifier: str
    config_hash: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    norm_offset: float
    embed_scale: float
    logit_scale: float
    logit_softcap: float | None


class VerifierSpec(HeadConfig):
    """A verifier that can be opened.

    Attributes:
        source: folder or hub id, as `from_pretrained` takes it.
        revision: the hub's commit, or for a folder a fingerprint of its weight files.
        tied: what the configuration says of tied embeddings, if anything.
    """

    source: str
    revision: str
    tied: bool | None

    @classmethod
    def open(cls, source: str | Path) -> VerifierSpec:
        """Reads a verifier's configuration from a Hugging Face folder or hub id.

        Raises:
            HarnessError: nothing there, no config.json in it, or a key missing from it.
        """
        source = str(source)
        path = _file(source, "config.json")
        config = read_object(path, fix=WHOLE_FOLDER)
        generation_path = _optional_file(source, "generation_config.json")
        generation = read_object(generation_path, fix=WHOLE_FOLDER) if generation_path else {}
        fields = _flat_config(config, generation, path)
        fields["verifier"] = config.get("_name_or_path") or Path(source).name
        if not Path(source).is_dir():
            fields["verifier"] = source
        tied = _text_config(config).get("tie_word_embeddings", config.get("tie_word_embeddings"))
        opening = {"source": source, "revision": _revision(source, path), "tied": tied}
        return read_settings(cls, fields | opening, where=str(path))

    @property
    def head_config(self) -> HeadConfig:
        """The fields that travel with a head file."""
        return HeadConfig(**{name: getattr(self, name) for name in HeadConfig.model_fields})

    @cached_property
    def weight_files(self) -> dict[str, str]:
        """Stored tensor name -> file name, from the index or the single file.

        Raises:
            HarnessError: the verifier has no safetensors weights.
        """
        index = _optional_file(self.source, INDEX)
        if index is not None:
            names = read_object(index, fix=WHOLE_FOLDER).get("weight_map")
            if not isinstance(names, dict):
                raise HarnessError(
                    "the index of the verifier's weights cannot be used",
                    where=index,
                    rule="weight_map: tensor names to file names",
                    got=names,
                    fix=WHOLE_FOLDER,
                )
            return dict(names)
        for name in SINGLE:
            path = _optional_file(self.source, name)
            if path is not None:
                with open_tensors(path, fix=WHOLE_FOLDER) as file:
                    return dict.fromkeys(file.keys(), name)
        raise HarnessError(
            "the verifier has no safetensors weights",
            where=self.source,
            rule=f"{INDEX} or {SINGLE[0]}",
            fix="save it with save_pretrained, or give another folder or hub id",
        )

    @cached_property
    def keys(self) -> WeightKeys:
        """Stored names by role."""
        return find_keys(
            self.weight_files, self.num_hidden_layers, tied=self.tied, where=self.source
        )

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Opens the named tensors, memory-mapped; shards that hold none of them stay closed."""
        found: dict[str, Tensor] = {}
        for file_name in sorted({self.weight_files[name] for name in names}):
            with open_tensors(_file(self.source, file_name), fix=WHOLE_FOLDER) as file:
                for name in names:
                    if self.weight_files[name] == file_name:
                        found[name] = file.get_tensor(name)
        return found


@dataclass(frozen=True)
class VerifierHead:
    """The part of a verifier that training uses.

    Attributes:
        embed: [V, H], not scaled by `config.embed_scale`.
        norm: [H], without `config.norm_offset`.
        lm_head: [V, H].
        layer: weights of the last decoder layer by Hugging Face Llama name
            (`self_attn.q_proj.weight`, ...), None for verifiers whose layers are not Llama-like.
    """

    config: HeadConfig
    embed: Tensor
    norm: Tensor
    lm_head: Tensor
    layer: dict[str, Tensor] | None


def write_head(spec: VerifierSpec, path: Path) -> None:
    """Writes embed, norm, lm_head and the last Llama-like layer in the verifier's dtype.

    Raises:
        HarnessError: a weight is missing, ambiguous, or of a shape that the configuration denies.
    """
    keys = spec.keys
    stored = spec.tensors(keys.all)
    head = {"embed": stored[keys.embed], "norm": stored[keys.norm]}
    # A copy where the output is tied: every reader finds all three.
    head["lm_head"] = stored[keys.lm_head] if keys.lm_head else head["embed"].clone()
    rows, hidden = spec.vocab_size, spec.hidden_size
    for role, shape in (("embed", [rows, hidden]), ("norm", [hidden]), ("lm_head", [rows, hidden])):
        if list(head[role].shape) != shape:
            raise HarnessError(
                f"the verifier's {role} weight does not fit its configuration",
                where=f"{spec.source}: {keys.lm_head if role == 'lm_head' else role}",
                rule=f"shape {shape}",
                got=list(head[role].shape),
            )
    for name, key in (keys.layer or {}).items():
        head[f"layer.{name}"] = stored[key]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    metadata = {"config": spec.head_config.model_dump_json()}
    save_file({name: tensor.contiguous() for name, tensor in head.items()}, part, metadata)
    part.chmod(0o644)
    part.replace(path)


def read_head(path: Path, *, dtype: torch.dtype | None = None) -> VerifierHead:
    """Opens a head file, memory-mapped; converted to `dtype` where one is given.

    Raises:
        HarnessError: no such file, or not a head file.
    """
    if not path.is_file():
        raise HarnessError("the verifier head is missing", where=path, fix="run the verifier stage")
    with open_tensors(path, fix="run the verifier stage again") as file:
        metadata = file.metadata() or {}
        if "config" not in metadata:
            raise HarnessError("not a verifier head file", where=path, rule="metadata key config")
        tensors = {name: file.get_tensor(name).to(dtype=dtype) for name in file.keys()}  # noqa: SIM118
    config = read_settings(HeadConfig, json.loads(metadata["config"]), where=str(path))
    layer = {
        name.removeprefix("layer."): tensor
        for name, tensor in tensors.items()
        if name.startswith("layer.")
    }
    return VerifierHead(
        config, tensors["embed"], tensors["norm"], tensors["lm_head"], layer or None
    )


def load_model(spec: VerifierSpec, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The verifier as a Hugging Face causal LM in eval mode, gradients off."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(spec.source)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    model: nn.Module = auto.from_pretrained(spec.source, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


def decoder_of(model: Any) -> Any:
    """The text decoder inside a loaded verifier: has `embed_tokens`, `layers` and `norm`."""
    decoder = model.get_decoder()
    # Vision-language models answer with the whole multimodal body.
    inner = getattr(decoder, "language_model", None)
    return decoder if inner is None else inner


def load_tokenizer(spec: VerifierSpec) -> Any:
    """The verifier's tokenizer with its chat template.

    Raises:
        HarnessError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.source)
    except (OSError, ValueError) as error:
        raise HarnessError(
            "the verifier's tokenizer cannot be loaded",
            where=spec.source,
            rule="tokenizer.json beside the weights",
            got=str(error).strip().split("\n")[0],
            fix=WHOLE_FOLDER,
        ) from None
    if not tokenizer.chat_template:
        raise HarnessError(
            "the verifier's tokenizer has no chat template",
            where=spec.source,
            rule="chat_template.jinja beside the tokenizer, or chat_template in its config",
            fix="use an instruction-tuned verifier",
        )
    return tokenizer


def verifier_files(source: str) -> list[Path]:
    """All files of a verifier's folder that loading it may need; downloads a hub id's first."""
    if not Path(source).is_dir():
        from huggingface_hub import snapshot_download

        _file(source, "config.json")
        source = snapshot_download(source, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
    kinds = (".safetensors", ".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
    return [path for path in sorted(Path(source).iterdir()) if path.suffix in kinds]


def link_verifier(source: str, out: Path) -> None:
    """Makes a folder of links to a verifier's files: weights of a terabyte are not copied.

    Raises:
        HarnessError: no verifier there.
    """
    _file(source, "config.json")
    out.mkdir(parents=True, exist_ok=True)
    for path in verifier_files(source):
        link = out / path.name
        link.unlink(missing_ok=True)
        if path.suffix == ".safetensors":
            link.symlink_to(path.resolve())
        else:
            shutil.copyfile(path, link)
    config = read_object(out / "config.json")
    config.setdefault("_name_or_path", source if not Path(source).is_dir() else Path(source).name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in NESTED:
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def _flat_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """config.json (nested or flat) and generation_config.json as `HeadConfig` fields."""
    text = _text_config(config)

    def need(name: str) -> Any:
        if text.get(name) is None:
            raise HarnessError("the verifier's configuration lacks a key", where=path, rule=name)
        value = text[name]
        if name != "model_type" and (type(value) is not int or value < 1):
            raise HarnessError(
                "the verifier's configuration cannot be used",
                where=f"{path}, {name}",
                rule="a whole number above 0",
                got=repr(value),
            )
        return value

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    # Latent attention (DeepSeek): the size that a plain attention of the same shape would have.
    head_dim = text.get("v_head_dim") if "kv_lora_rank" in text else text.get("head_dim")
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if "full_attention" in rope:  # one entry for each kind of layer
        rope = dict(rope["full_attention"])
    theta = rope.pop("rope_theta", None) or text.get("rope_theta") or 10000.0
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    kind = str(text.get("model_type") or need("model_type"))
    eos: list[int] = []
    for holder in (text, config, generation):
        value = holder.get("eos_token_id")
        eos += value if isinstance(value, list) else [] if value is None else [value]
    embed_scale = math.sqrt(hidden) if kind in SQRT_EMBEDDINGS else 1.0
    logit_scale = text.get("logit_scale") or text.get("lm_head_multiplier") or 1.0
    if text.get("logits_scaling"):  # Granite divides, HyperCLOVA X multiplies
        scaling = float(text["logits_scaling"])
        logit_scale = scaling if kind.startswith("hyperclovax") else 1.0 / scaling
    softcap = text.get("final_logit_softcapping")
    volatile = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
    return {
        "config_hash": digest({k: v for k, v in config.items() if k not in volatile})[:16],
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": need("num_hidden_layers"),
        "vocab_size": need("vocab_size"),
        "intermediate_size": need("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": text.get("hidden_act") or text.get("hidden_activation") or "silu",
        "rms_norm_eps": float(text.get("rms_norm_eps") or text.get("layer_norm_eps") or 1e-6),
        "rope_theta": float(theta),
        "rope_scaling": None if plain else rope,
        "max_position_embeddings": need("max_position_embeddings"),
        "bos_token_id": text.get("bos_token_id", config.get("bos_token_id")),
        "eos_token_ids": sorted(set(eos)),
        "norm_offset": 1.0 if kind in OFFSET_NORMS else 0.0,
        "embed_scale": float(text.get("embedding_multiplier") or embed_scale),
        "logit_scale": float(logit_scale),
        "logit_softcap": None if softcap is None else float(softcap),
    }


def _optional_file(source: str, name: str) -> Path | None:
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    from huggingface_hub import file_exists, hf_hub_download, try_to_load_from_cache

    if isinstance(cached := try_to_load_from_cache(source, name), str):
        return Path(cached)
    return Path(hf_hub_download(source, name)) if file_exists(source, name) else None


def _file(source: str, name: str) -> Path:
    """The path of a verifier's file, downloaded first where `source` is a hub id."""
    folder = Path(source)
    # "data/verifier" has the form of a hub id: where its parent is a folder here, a path is meant.
    local = folder.is_dir() or source.count("/") != 1 or folder.parent.is_dir()
    try:
        path = folder / name if local else _optional_file(source, name)
    except Exception as error:
        raise HarnessError(
            f"the verifier's {name} is neither in a folder here nor to be had from the hub",
            where=source,
            rule="a Hugging Face model folder or hub id",
            got=error,
            fix="run the verifier stage, or correct verifier.source",
        ) from None
    if path is None or not path.is_file():
        raise HarnessError(
            f"the verifier's {name} is missing",
            where=source,
            rule="a Hugging Face model folder or hub id",
            fix="run the verifier stage, or correct verifier.source",
        )
    return path


def _revision(source: str, config: Path) -> str:
    """The hub's commit; for a folder a fingerprint of the weight files.

    A fingerprint reads the first and last MiB of each file: enough to tell a verifier from a
    rounded or finetuned one, without reading a terabyte.
    """
    if not Path(source).is_dir():
        return config.parent.name
    parts = []
    for path in sorted(Path(source).glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(1 << 20)
            file.seek(max(0, size - (1 << 20)))
            parts.append([path.name, size, start.hex(), file.read(1 << 20).hex()])
    return digest(parts)[:16]
