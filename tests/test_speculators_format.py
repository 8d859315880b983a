"""The speculators format: what is written is explicit, what is read is the same drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.checkpoint import load_drafter, save_drafter
from eagle3.errors import HarnessError
from eagle3.export import export, probe
from eagle3.initialise import DrafterSettings, from_checkpoint, new_drafter
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head, write_head
from eagle3.vocab import DraftVocabulary
from tests.tiny_head import LAYERS, V, make_head, vocabulary

SWITCHED = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}


def saved(folder: Path, *, ids: tuple[int, ...] = (1, 4, 9), **settings: object) -> Path:
    head = make_head()
    chosen = DrafterSettings.model_validate({"layer_init": "random", **settings})
    drafter = new_drafter(head, vocabulary(*ids), LAYERS, chosen, seed=3)
    save_drafter(folder, drafter, head.config, torch.float32)
    return folder


@pytest.mark.parametrize("switches", [{}, SWITCHED, {"norm_before_fc": True}])
def test_there_and_back(tmp_path: Path, switches: dict[str, bool]) -> None:
    head = make_head()
    ours = load_drafter(saved(tmp_path / "ours", **switches), head, torch.float32)
    save_drafter(tmp_path / "theirs", ours, head.config, torch.float32, "speculators")
    back = load_drafter(tmp_path / "theirs", head, torch.float32)
    assert back.config == ours.config
    assert torch.equal(probe(back), probe(ours))
    assert torch.equal(back.d2t, ours.d2t) and torch.equal(back.t2d, ours.t2d)
    names = set(load_file(tmp_path / "theirs" / "model.safetensors"))
    assert {"layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "d2t", "t2d"} <= names
    assert not [name for name in names if name.startswith("midlayer")]
    assert ("input_norm.weight" in names) == ("norm_before_fc" in switches)


def test_config_leaves_nothing_to_guess(tmp_path: Path) -> None:
    export(saved(tmp_path / "ours"), tmp_path / "out", make_head(), "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in LAYERS]
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[name] for name in switches] == [False] * 4
    layer = config["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert layer["num_aux_hidden_states"] == 3 and layer["vocab_size"] == V
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    # A name that nobody can open would make `vllm serve` and speculators look for it.
    assert config["speculators_config"]["verifier"]["name_or_path"] is None


def test_a_full_vocabulary_has_no_maps(tmp_path: Path) -> None:
    head = make_head()
    ours = load_drafter(saved(tmp_path / "ours", ids=tuple(range(V))), head, torch.float32)
    save_drafter(tmp_path / "theirs", ours, head.config, torch.float32, "speculators")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "theirs" / "model.safetensors"))
    back = load_drafter(tmp_path / "theirs", head, torch.float32)
    assert not back.d2t.any() and bool(back.t2d.all())
    assert torch.equal(probe(back), probe(ours))


def test_finetuning_starts_from_it(tmp_path: Path) -> None:
    head = make_head()
    ours = load_drafter(saved(tmp_path / "ours", head="random"), head, torch.float32)
    save_drafter(tmp_path / "theirs", ours, head.config, torch.float32, "speculators")
    drafter = from_checkpoint(tmp_path / "theirs", head, vocabulary(4, 7, 9), LAYERS)
    assert torch.equal(drafter.lm_head.weight[0], ours.lm_head.weight[1])
    assert torch.equal(drafter.midlayer.mlp.up_proj.weight, ours.midlayer.mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle"}, "speculators_model_type"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "num_hidden_layers"),
        ({"transformer_layer_config": {"attention_bias": True}}, "attention_bias"),
        ({"norm_before_residual": None}, "leaves open"),
        ({"eagle_aux_hidden_state_layer_ids": None, "aux_layers": None}, "does not say which"),
        ({"aux_layers": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "does not have"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    export(saved(tmp_path / "ours"), tmp_path / "out", make_head(), "speculators")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for name, value in change.items():
        if isinstance(value, dict):
            config[name] |= value
        elif value is None:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))
    with pytest.raises(HarnessError, match=message):
        load_drafter(tmp_path / "out", make_head(), torch.float32)


def test_an_older_config_with_flat_rope_is_read(tmp_path: Path) -> None:
    export(saved(tmp_path / "ours"), tmp_path / "out", make_head(), "speculators")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    del config["transformer_layer_config"]["rope_parameters"], config["aux_layers"]
    config["transformer_layer_config"] |= {"rope_theta": 50000.0, "rope_scaling": None}
    path.write_text(json.dumps(config))
    read = load_drafter(path.parent, make_head(), torch.float32).config
    assert read.rope_theta == 50000.0 and read.rope_scaling is None
    assert read.aux_layers == LAYERS


def test_the_command_goes_both_ways(tmp_path: Path, tiny_verifier: Path) -> None:
    """From our layout to speculators' and back: the same tensors, bfloat16."""
    from experiments.export_command import run

    spec = VerifierSpec.open(tiny_verifier)
    write_head(spec, tmp_path / "head.safetensors")
    head = read_head(tmp_path / "head.safetensors")
    words = DraftVocabulary.from_targets(torch.arange(0, 100, 3), spec.vocab_size)
    drafter = new_drafter(head, words, (0, 2, 3), DrafterSettings(), seed=1)
    save_drafter(tmp_path / "ours", drafter, head.config, torch.bfloat16)
    there, back = tmp_path / "out" / "theirs", tmp_path / "out" / "back"
    run(checkpoint=tmp_path / "ours", out=there, verifier_path=str(tiny_verifier),
        layout="speculators")  # fmt: skip
    named = json.loads((there / "config.json").read_text())["speculators_config"]["verifier"]
    assert named == {"name_or_path": str(tiny_verifier), "architectures": ["LlamaForCausalLM"]}
    run(checkpoint=there, out=back, verifier_path=str(tmp_path / "head.safetensors"),
        layout="eagle")  # fmt: skip
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    again = load_file(back / "model.safetensors")
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["back", "theirs"]
    (back / "notes.txt").write_text("mine")
    with pytest.raises(HarnessError, match="holds other files"):
        run(checkpoint=there, out=back, verifier_path=str(tiny_verifier), layout="eagle")
    with pytest.raises(HarnessError, match="replace the checkpoint"):
        run(checkpoint=there, out=there, verifier_path=str(tiny_verifier), layout="eagle")
    with pytest.raises(HarnessError, match="cannot be written"):
        run(checkpoint=there, out=Path("/proc/none"), verifier_path=str(tiny_verifier),
            layout="eagle")  # fmt: skip
