"""A project on disk for studies: a random verifier's head, states that can be learnt, a checkpoint.

The next token is a function of the last one, and the aux states of a token are its own, so that a
few steps of training raise τ and settings differ in how far.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import optuna
import torch

from eagle3.arm import ArmData, first_drafter, open_states
from eagle3.checkpoint import save_drafter
from eagle3.dataset import Document, StatesMeta
from eagle3.shard_writer import ShardWriter
from eagle3.train_settings import TrainSettings
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.vocab import build_vocabulary, write_vocabulary
from experiments.study.run import run_study
from tests.settings_of import write_settings

ARMS = ("scratch", "finetune")
TOKENS = range(3, 67)  # the language's tokens
SETTINGS: dict[str, Any] = {
    "run": {"threads": 1},
    "train": {
        "lr": 5.0e-3,
        "batch_tokens": 96,
        "dtype": "float32",
        "log_every": 5,
        "save_every": 4,
        "objective": {"ttt_steps": 2, "step_decay": 0.8},
        "dev_drafts": 2,
    },
    "arms": {"base": None, "scratch_large": None},
    "evaluate": {"k": 2, "dtype": "float32"},
    "study": {
        "trials": 4,
        "startup": 2,
        "cost": 1500,
        "rung_documents": 3,
        "compare": {"seeds": 2, "larger_seeds": 2, "checkpoint_tokens": 300},
        "aa": {"cost": 600, "simulations": 1000},
        "crossover": {"bits": [3], "tokens": [300, 600], "seeds": 2},
    },
    "scaling": {
        "parts": [8, 4, 2, 1],
        "passes": 2.0,
        "evaluations": 2,
        "seeds": 2,
        "target": 1.5,
    },
}


def make_project(folder: Path, verifier: Path, project_root: Path) -> Path:
    """Writes what `eagle3 study` reads, params.yaml's own with tiny numbers; returns the folder."""
    data = folder / "data"
    data.mkdir(parents=True)
    spec = VerifierSpec.open(str(verifier))
    write_head(spec, data / "verifier_head.safetensors")
    head = read_head(data / "verifier_head.safetensors")
    counts = torch.zeros(spec.vocab_size, dtype=torch.int64)
    counts[list(TOKENS)] = 1
    vocabulary = build_vocabulary(counts, 80, head.config.eos_token_ids)
    write_vocabulary(vocabulary, data / "vocab.safetensors", metadata={})
    for split, count, tail in (("train", 60, 0), ("dev", 8, 4), ("test", 10, 4)):
        writer = ShardWriter(data / "hidden_states" / split, _meta(spec))
        for document in documents(head, count, split, tail):
            writer.add(document)
        writer.finish()
    opened = open_states(data / "hidden_states", head, vocabulary)
    save_checkpoint(folder / "checkpoints" / "base", opened)
    (folder / "parity.json").write_text("{}")
    write_settings(folder, project_root, SETTINGS)
    return folder


def use_store(folder: Path, empty_store: Path) -> None:
    """MLflow's tables, ready: making them takes seconds."""
    shutil.copy(empty_store, folder / "mlflow.db")


def save_checkpoint(folder: Path, data: ArmData, seed: int = 3) -> None:
    """An untrained drafter with random weights."""
    settings = TrainSettings.model_validate(
        {"lr": 1.0, "drafter": {"layer_init": "random", "fc_init": "random"}}
    )
    nowhere = folder.parent / "from scratch"
    drafter = first_drafter(nowhere, data, settings, seed)
    save_drafter(folder, drafter, data.head.config, torch.float32)


def documents(head: VerifierHead, count: int, split: str, tail: int) -> list[Document]:
    """Documents of the language; test ones of two benchmarks."""
    named = torch.Generator().manual_seed
    draw = named(sum(map(ord, split)))
    size, width = head.config.vocab_size, head.config.hidden_size
    follow = torch.arange(size)
    inside = torch.tensor(list(TOKENS))
    follow[inside] = inside[torch.randperm(len(inside), generator=named(99))]
    table = torch.randn(size, width, generator=named(98))
    made = []
    for index in range(count):
        length = int(torch.randint(10, 20, (1,), generator=draw)) + tail
        tokens = [int(inside[int(torch.randint(len(inside), (1,), generator=draw))])]
        while len(tokens) < length:
            tokens.append(int(follow[tokens[-1]]))
        ids = torch.tensor(tokens)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[3 : length - tail] = 1
        made.append(
            Document(
                id=f"{split}-{index:02d}",
                source=("mt_bench", "human_eval")[index % 2] if split == "test" else "made",
                token_ids=ids.int(),
                loss_mask=mask,
                aux=table[ids][:, None].repeat(1, 3, 1).bfloat16(),
                final=(20.0 * head.lm_head[follow[ids]]).bfloat16(),
                verifier_top1=follow[ids].int(),
                verifier_lse=torch.zeros(length),
            )
        )
    return made


def _meta(spec: VerifierSpec) -> StatesMeta:
    return StatesMeta(
        verifier=spec.verifier,
        config_hash=spec.config_hash,
        engine="test",
        engine_version="1",
        aux_layers=[0, 2, 3],
        final_hidden="pre_norm",
        dtype="bfloat16",
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
    )


def run(project: Path, *, with_comparison: bool = False, **options: Any) -> None:
    """`eagle3 study` there; options as `run_study` has them."""
    given = {"name": None, "storage": None, "finetune_from": None, "workers": 1, **options}
    run_study(project, with_comparison=with_comparison, **given)


def study_of(project: Path, name: str, url: str | None = None) -> optuna.Study:
    """One of the Optuna studies in its store."""
    return optuna.load_study(study_name=name, storage=url or f"sqlite:///{project}/studies.db")
