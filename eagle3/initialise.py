"""What a drafter starts from: the verifier's own weights, random ones, or another drafter.

Legend: D draft vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from eagle3.checkpoint import embedding, fill
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.errors import HarnessError
from eagle3.formats.eagle import SWITCHES
from eagle3.formats.published import read_published
from eagle3.seeding import generator
from eagle3.settings import Settings
from eagle3.verifier import HeadConfig
from eagle3.verifier_head import VerifierHead
from eagle3.vocab import DraftVocabulary

log = logging.getLogger(__name__)


class DrafterSettings(Settings):
    """Shape of a new drafter and its first weights; None takes the verifier's value.

    layer_init: the draft layer from the verifier's last layer (its embedding half from zero), or
        random.
    fc_init: pass the highest aux layer on at first, or random.
    head: the verifier's rows, kept frozen; the same rows, trained; or random and trained.
    """

    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rope_theta: float | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer_init: Literal["verifier", "random"] = "verifier"
    fc_init: Literal["highest", "random"] = "highest"
    head: Literal["frozen", "trained", "random"] = "frozen"


def head_rows(head: VerifierHead, vocabulary: DraftVocabulary) -> Tensor:
    """The verifier's output rows of the draft vocabulary, its logit scale in them, [D, H]."""
    return head.lm_head[vocabulary.target_ids] * head.config.logit_scale


def new_drafter(
    head: VerifierHead,
    vocabulary: DraftVocabulary,
    aux_layers: tuple[int, ...],
    settings: DrafterSettings,
    seed: int,
) -> Drafter:
    """A drafter from scratch, float32.

    Args:
        vocabulary: of this verifier, as those who read or build one see to.

    Raises:
        HarnessError: the settings ask for weights that the verifier does not have in this shape.
    """
    verifier = head.config
    config = DrafterConfig(
        hidden_size=verifier.hidden_size,
        target_hidden_size=verifier.hidden_size,
        intermediate_size=settings.intermediate_size or verifier.intermediate_size,
        num_attention_heads=settings.num_attention_heads or verifier.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads or verifier.num_key_value_heads,
        head_dim=settings.head_dim or verifier.head_dim,
        vocab_size=verifier.vocab_size,
        draft_vocab_size=len(vocabulary),
        aux_layers=aux_layers,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_theta=settings.rope_theta or verifier.rope_theta,
        rope_scaling=None if settings.rope_theta else verifier.rope_scaling,
        max_position_embeddings=verifier.max_position_embeddings,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )
    drafter = Drafter(config, embedding(head, torch.float32))
    _randomise(drafter, seed)
    if settings.layer_init == "verifier":
        _copy_layer(drafter, head)
    if settings.fc_init == "highest":
        size = config.hidden_size
        drafter.fc.weight.data.zero_()
        drafter.fc.weight.data[:, -config.target_hidden_size :] = torch.eye(size)
    drafter.norm.weight.data.copy_(head.norm_weight)
    if settings.head != "random":
        drafter.lm_head.weight.data.copy_(head_rows(head, vocabulary))
    drafter.d2t.copy_(vocabulary.d2t)
    drafter.t2d.copy_(vocabulary.t2d)
    return drafter


def from_checkpoint(
    folder: Path,
    head: VerifierHead,
    vocabulary: DraftVocabulary,
    aux_layers: tuple[int, ...],
    drafter_layers: Sequence[int] | None = None,
) -> Drafter:
    """A drafter that goes on from another, for this verifier and draft vocabulary, float32.

    Its architecture is its config's own. Head rows move by token id; tokens that the other drafter
    did not have start from the verifier's rows.

    Args:
        aux_layers: of the data.
        drafter_layers: layers that it was trained on, where its config does not say so.

    Raises:
        HarnessError: a kind that is not trained here, it does not fit the verifier, or it was
            trained on other layers' states.
    """
    published = read_published(folder, head, aux_layers=drafter_layers)
    config, tensors = published.config, published.tensors
    refuse_other_layers(config, aux_layers, where=folder)
    for note in (*published.notes, *differences(config, head.config)):
        log.info("%s: %s", folder, note)
    old = _drafted(config, tensors, folder)
    place = torch.full((config.vocab_size,), -1)
    place[old] = torch.arange(len(old))
    source = place[vocabulary.target_ids]
    known = source >= 0
    rows = head_rows(head, vocabulary).float()
    rows[known] = tensors["lm_head.weight"][source[known]].float()
    log.info(
        "draft vocabulary: %d of %d head rows (%.1f%%) come from %s, %d (%.1f%%) from the "
        "verifier; %d of its %d tokens are not drafted any more",
        int(known.sum()),
        len(vocabulary),
        100 * float(known.float().mean()),
        folder,
        int((~known).sum()),
        100 * float((~known).float().mean()),
        len(old) - int(known.sum()),
        len(old),
    )
    moved = {**tensors, "lm_head.weight": rows, "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    config = config.model_copy(update={"draft_vocab_size": len(vocabulary)})
    drafter = Drafter(config, embedding(head, torch.float32))
    fill(drafter, moved, where=folder)
    return drafter


def refuse_other_layers(config: DrafterConfig, data_layers: Sequence[int], *, where: Path) -> None:
    """Raises:
    HarnessError: the drafter was trained on other layers' states than the data holds.
    """
    if list(config.aux_layers) != list(data_layers):
        raise HarnessError(
            "the drafter was trained on other layers than the data holds",
            where=where,
            rule=f"aux layers of the data: {list(data_layers)}",
            got=f"of the drafter: {list(config.aux_layers)}",
            fix="extract the drafter's layers (extract.aux_layers), start from scratch, or, if its "
            "config is wrong, --drafter-aux-layers with what it was trained on",
        )


def differences(config: DrafterConfig, verifier: HeadConfig) -> list[str]:
    """How a drafter is built otherwise than one from scratch for this verifier would be."""
    plain = {
        "intermediate_size": verifier.intermediate_size,
        "num_attention_heads": verifier.num_attention_heads,
        "num_key_value_heads": verifier.num_key_value_heads,
        "head_dim": verifier.head_dim,
        "rms_norm_eps": verifier.rms_norm_eps,
        "rope_theta": verifier.rope_theta,
        "rope_scaling": verifier.rope_scaling,
        "max_position_embeddings": verifier.max_position_embeddings,
        **dict.fromkeys(SWITCHES, False),
    }
    return [
        f"{name} is {getattr(config, name)}, where one from scratch has {value}"
        for name, value in plain.items()
        if getattr(config, name) != value
    ]


def _drafted(config: DrafterConfig, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    """The verifier's ids of a checkpoint's draft tokens, i64[D].

    Raises:
        HarnessError: its head rows are not those of its config.
    """
    size = config.draft_vocab_size
    found = list(tensors["lm_head.weight"].shape)
    if found != [size, config.hidden_size]:
        raise HarnessError(
            "tensor lm_head.weight does not fit the config", where=folder,
            rule=[size, config.hidden_size], got=found,
            fix="download or save the drafter again, whole",
        )  # fmt: skip
    return tensors["d2t"].long() + torch.arange(size)


def _randomise(drafter: Drafter, seed: int) -> None:
    """Normal weights of deviation 1/sqrt(inputs), each from a generator of its own name."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            draw = generator("init", seed, name)
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=draw)


def _copy_layer(drafter: Drafter, head: VerifierHead) -> None:
    """The verifier's last layer into the half of the draft layer that reads hidden states."""
    if head.layer is None:
        raise HarnessError(
            f"{head.config.verifier} has no Llama-like last layer to start from",
            where="drafter.layer_init",
            rule="random, for this verifier",
            got="verifier",
            fix="set layer_init: random",
        )
    layer, config, offset = drafter.midlayer, drafter.config, head.config.norm_offset
    size = config.hidden_size
    targets: dict[str, Tensor] = {
        "input_layernorm.weight": layer.hidden_norm.weight.data,
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight.data,
        "self_attn.o_proj.weight": layer.self_attn.o_proj.weight.data,
        "mlp.gate_proj.weight": layer.mlp.gate_proj.weight.data,
        "mlp.up_proj.weight": layer.mlp.up_proj.weight.data,
        "mlp.down_proj.weight": layer.mlp.down_proj.weight.data,
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight.data
        weight[:, :size] = 0.0
        targets[f"self_attn.{name}.weight"] = weight[:, size:]
    for name, target in targets.items():
        source = head.layer[name].float()
        if source.shape != target.shape:
            raise HarnessError(
                f"the verifier's last layer does not fit the drafter: {name}",
                where="drafter.layer_init",
                rule=list(target.shape),
                got=list(source.shape),
                fix="leave the drafter's shape to the verifier, or set layer_init: random",
            )
        target.copy_(source + offset if "norm" in name else source)
