"""The default verifier itself, and a drafter that it really accepts from, in SGLang in float32.

Random models decide few of the things that matter: their states are alike and their drafts hardly
ever right. Here the stages make a small real chain, and SGLang serves what they trained.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3.dataset import StatesDataset
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.exactness import NEAR_TIE, check_near_tie, parting
from eagle3.local_decoding import exact_decoding, exact_logits, spread_prompts
from eagle3.prompt_sources import PromptSettings
from eagle3.prompts import Prompt
from eagle3.served_decoding import decode_served, served_counts, serving_engine
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head
from experiments.settings_check import check_settings
from stages.params import read_params, section_values
from tests.engine_checks import installed
from tests.settings_of import write_settings
from tests.test_kimi_pipeline import stage

TRAINING = {"mt_bench": 40, "human_eval": 24}  # prompts, the shortest
HELD_OUT = 2  # of each, the next longer ones
DECODED = 40  # tokens of a prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Chain:
    """What the stages left.

    Attributes:
        parity: what the parity stage said of the training states, against SGLang.
        states: of the held-out prompts with their answers.
        exported: the drafter as engines load it, with its verifier.
    """

    parity: dict[str, Any]
    states: StatesDataset
    exported: Subject


def settings_of_the_chain() -> dict[str, Any]:
    """What differs from params.yaml: less of everything."""
    return {
        "run": {"threads": int(os.environ["OMP_NUM_THREADS"])},
        "prompts": {
            "source": "prompts.jsonl", "count": None, "writing": None,
            "test": [{"name": name, "path": f"{name}.jsonl"} for name in TRAINING],
        },
        "regenerate": {"max_new_tokens": 48},
        "parity": {
            "engine": "sglang", "server": installed("sglang").model_dump(),
            "documents": 2, "max_tokens": 96,
        },
        "train": {"evaluations": 1},
        "arms": {"scratch": {"tokens": 24000}},  # the only one that is trained here
    }  # fmt: skip


def write_prompts(params: dict[str, Any], packages: Path) -> None:
    """Some of each benchmark to train on and some to hold out: writing prompts takes longer."""
    values = section_values(params, "prompts", where=Path("params.yaml"))

    def write(path: str, prompts: list[Prompt]) -> None:
        lines = [json.dumps({"messages": prompt.as_messages()}) + "\n" for prompt in prompts]
        Path(path).write_text("".join(lines))

    training: list[Prompt] = []
    for benchmark in PromptSettings.model_validate(values).test:
        found, count = benchmark.read(packages), TRAINING[benchmark.name]
        found.sort(key=lambda prompt: len(prompt.messages[-1][1]))
        training += found[:count]
        write(f"{benchmark.name}.jsonl", found[count : count + HELD_OUT])
    write("prompts.jsonl", training)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, project_root: Path, empty_store: Path) -> Chain:
    root = tmp_path_factory.mktemp("smollm2")
    params = read_params(project_root / "params.yaml")
    # Packages are fetched once for the project, not once for its tests.
    packages = project_root / ".work" / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    (root / ".work").mkdir()
    (root / ".work" / "packages").symlink_to(packages)
    shutil.copy(empty_store, root / "mlflow.db")
    write_settings(root, project_root, settings_of_the_chain())
    check_settings(read_params(root / "params.yaml"), "smollm2")
    verifier, head = "data/verifier", "data/verifier_head.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        write_prompts(params, packages)
        stage("verifier", "--out", verifier, "--head", head)
        stage("prompts", "--verifier", verifier, "--out", "data/prompts")
        stage("regenerate", "--verifier", verifier, "--prompts", "data/prompts",
              "--out", "data/responses")  # fmt: skip
        stage("extract", "--verifier", verifier, "--responses", "data/responses",
              "--out", "data/hidden_states")  # fmt: skip
        stage("parity", "--states", "data/hidden_states", "--verifiers", verifier,
              "--heads", head, "--out", "metrics/parity.json")  # fmt: skip
        stage("vocab", "--verifier", verifier, "--responses", "data/responses",
              "--out", "data/vocab.safetensors", "--metrics", "metrics/vocab.json")  # fmt: skip
        stage("train", "--arm", "scratch", "--parity", "metrics/parity.json",
              "--out", "checkpoints/scratch", "--curve", "metrics/curve.jsonl")  # fmt: skip
        stage("export", "--checkpoint", "checkpoints/scratch", "--head", head,
              "--out", "checkpoints/export/scratch")  # fmt: skip
    return Chain(
        parity=json.loads((root / "metrics" / "parity.json").read_text()),
        states=StatesDataset.open(root / "data" / "hidden_states" / "test"),
        exported=Subject(
            VerifierSpec.open(root / verifier),
            read_head(root / head),
            root / "checkpoints" / "export" / "scratch",
            "cpu",
        ),
    )


def test_sglangs_states_are_those_that_training_saw(chain: Chain) -> None:
    """Each captured layer and the final state, in bfloat16, by the stage that lets training run."""
    assert chain.parity["engine"] == "sglang"
    (by_split,) = chain.parity["states"].values()
    assert set(by_split) == {"train", "dev"}
    for found in by_split.values():
        assert found["made_by"].startswith("transformers ")
        assert found["words"].startswith("equal to sglang ") and found["engine"]["documents"] == 2
        states = found["engine"]["states"]
        assert [one["found"] for one in states] == [
            *(f"the output of layer {layer}" for layer in (1, 14, 26)),
            "the output of layer 29 after the last norm",
        ]
        for one in states:
            assert 0 < one["error"] < 0.05 < one["next_reading"], one


def test_a_drafter_that_is_accepted_from(chain: Chain, tmp_path: Path) -> None:
    """SGLang's text with drafts is its text without, and its counts are the local engine's, token
    for token but where two tokens of the verifier are as good as equal."""
    prompts = spread_prompts(chain.states, HELD_OUT * len(TRAINING))
    settings = EvaluateSettings(
        engine="sglang", engine_dtype="float32", decode_tokens=DECODED, server=installed("sglang")
    )
    serving = serving_engine(chain.exported, prompts, settings, tmp_path)
    assert serving is not None
    served = decode_served(serving, chain.exported, prompts, settings)
    local = exact_decoding(chain.exported, prompts, settings).speculative
    logits_after = exact_logits(chain.exported)
    counts = served_counts(served, prompts, local, settings.k, logits_after)
    assert (counts["engine"], counts["dtype"], counts["prompts"]) == ("sglang", "float32", 4)
    for one in counts["differences"]:
        assert one["gap"] is not None and one["gap"] < NEAR_TIE, one
    ties = 0
    for prompt, answer, own in zip(prompts, served.speculative, local, strict=True):
        tie = parting(prompt.id, prompt.token_ids, own.token_ids, answer.token_ids, logits_after)
        if tie is not None:
            check_near_tie(tie)
            ties += 1
            continue
        assert answer.verify_steps == own.verify_steps
        assert answer.accepted_per_position == own.accepted_per_position
    assert ties <= 1
    assert counts["accepted_per_position"][0] > 0 and counts["tau"] > 1.1
