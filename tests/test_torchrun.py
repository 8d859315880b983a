"""torchrun starts the commands as people call them: one checkpoint, one run, one voice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.params import dump_yaml, read_yaml
from tests.settings_of import change
from tests.test_train_flags import project, train

__all__ = ["project"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def torchrun(root: Path, code: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *command],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_command_of_people(project: Path, project_root: Path, parallel: str) -> None:
    change(project, train={"accumulate": 2, "parallel": parallel, "dtype": "float32"})
    train(epochs=2, val_ratio=0.2, output_dir=Path("alone"))
    main = "from experiments.cli import main; main()"
    flags = "--verifier-path head.safetensors --data-dir states --output-dir drafter --epochs 2"
    done = torchrun(
        project, project_root, "--no-python", sys.executable, "-c", main, "train",
        *flags.split(), "--val-ratio", "0.2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("from scratch: no --finetune-from") == 2  # before they are joined
    assert done.stderr.count("drafter: drafter") == 1
    assert {path.name for path in (project / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
        "provenance.json",
    }
    ours, alone = (load_file(project / name / "model.safetensors") for name in ("drafter", "alone"))
    assert ours.keys() == alone.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)
    assert not list((project / ".work").glob("train-command*"))
    journals = list((project / ".work" / "tracking").glob("*/journal.jsonl"))
    assert len(journals) <= 2  # one for each of the two trainings, or sent already


@pytest.mark.slow
def test_an_error_ends_all(project: Path, project_root: Path) -> None:
    """More processes than passes: told, and nothing is left."""
    main = "from experiments.cli import main; main()"
    flags = "--verifier-path head.safetensors --data-dir states --output-dir drafter"
    done = torchrun(
        project, project_root, "--no-python", sys.executable, "-c", main, "train", *flags.split()
    )
    assert done.returncode != 0
    assert "more processes than passes" in done.stderr
    assert not (project / "drafter").exists()


@pytest.mark.slow
def test_the_stage(project: Path, project_root: Path) -> None:
    train(epochs=1, val_ratio=0.0, output_dir=Path("alone"))  # for a vocabulary
    tensors = load_file(project / "alone" / "model.safetensors")
    from safetensors.torch import save_file

    save_file({"d2t": tensors["d2t"], "t2d": tensors["t2d"]}, project / "vocab.safetensors")
    (project / "data").mkdir()
    shutil.copytree(project / "states", project / "data" / "train")
    for name in ("stages", "eagle3"):  # the code, whose digest is part of the work's key
        (project / name).symlink_to(project_root / name)
    params = read_yaml(project / "params.yaml")
    params["train"] |= {"accumulate": 2, "dtype": "float32"}
    params["arms"] = {
        "scratch": {
            "init": "head.safetensors",
            "head": "head.safetensors",
            "states": "data",
            "vocab": "vocab.safetensors",
            "epochs": 1,
        }
    }
    (project / "params.yaml").write_text(dump_yaml(params))
    (project / "parity.json").write_text('{"words": "by hand"}')
    flags = "--arm scratch --out out --curve curve.jsonl --parity parity.json"
    done = torchrun(project, project_root, "-m", "stages.train", *flags.split())
    assert done.returncode == 0, done.stderr
    about = json.loads((project / "provenance" / "train.json").read_text())
    assert about["notes"]["processes"] == 2
    assert len(about["mlflow_runs"]) == 1
    assert (project / "out" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (project / "curve.jsonl").read_text().splitlines()]
    points = [(line["metric"], line["step"]) for line in lines]
    assert len(points) == len(set(points))
