"""Results of an imagined run, in the form in which the stages write them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from eagle3.acceptance import PromptCounts, by_benchmark, summarise, write_counts
from eagle3.comparison import CompareSettings, compare

ARMS = {"base": 0.17, "scratch": 0.27, "finetune": 0.3, "scratch_large": 0.29}


def write_made_up(root: Path) -> dict[str, list[Path]]:
    """Writes metrics, curves, provenance and the comparison of four arms; returns the paths."""
    rng = torch.Generator().manual_seed(5)
    difficulty = torch.rand(244, generator=rng)
    runs, timings = {}, {}
    paths: dict[str, list[Path]] = {
        name: [] for name in ("summaries", "timings", "curves", "stages")
    }
    for number, (arm, rate) in enumerate(ARMS.items()):
        counts = [
            _prompt(index, rate, float(difficulty[index]), torch.Generator().manual_seed(index))
            for index in range(244)
        ]
        runs[arm] = [counts]
        write_counts(root / "metrics" / f"{arm}.jsonl", counts)
        summary = {
            name: summarise(group)
            | {"vocabulary_coverage": 0.93 - 0.02 * (name != "mt_bench"), "distinct_trigrams": 0.81}
            for name, group in by_benchmark(counts).items()
        }
        everything = summary.pop("all")
        decode = {
            "dtype": "float32",
            "tau": everything["tau"],
            "exactness": {
                "prompts": 16,
                "equal": 16 - (arm == "scratch"),
                "near_ties": [
                    {"id": "6f2b", "position": 41, "plain": 18, "speculative": 905, "gap": 3.1e-5}
                ]
                if arm == "scratch"
                else [],
            },
        }
        paths["summaries"].append(
            _write(
                root / "metrics" / f"{arm}.json",
                {
                    "arm": arm,
                    "verifier": "Imagined-1B",
                    "k": 3,
                    "dtype": "bfloat16",
                    "benchmarks": summary,
                }
                | {"all": everything, "decode": decode},
            )
        )
        r, c = 1.06 + 0.01 * number, 0.055
        timings[arm] = {
            "arm": arm, "k": 3, "dtype": "bfloat16", "temperature": 0.0, "draft": "argmax",
            "device": "cpu", "threads": 2, "prompts": 16, "max_tokens": 64,
            "plain_tokens_per_s": 27.4, "speculative_tokens_per_s": 27.4 * everything["tau"] / 1.24,
            "speedup": everything["tau"] / 1.24, "r": r, "c": c, "break_even_tau": r + 3 * c,
            "verify_costs": [1.02, 1.04, r],
        }  # fmt: skip
        paths["timings"].append(_write(root / "metrics" / f"{arm}.timing.json", timings[arm]))
        paths["curves"].append(_curve(root / "metrics" / f"{arm}.curve.jsonl", rate, number, rng))
        for stage, seconds in ((f"train@{arm}", 180 + 60 * number), (f"evaluate@{arm}", 81.0)):
            paths["stages"].append(_stage(root, stage, seconds))
    for stage, seconds in (
        ("verifier", 51.0),
        ("sibling", 12.0),
        ("regenerate", 309.2),
        ("extract", 88.0),
    ):
        paths["stages"].append(_stage(root, stage, seconds))
    coverage = {
        "size": 8192,
        "splits": {
            name: {"supervised": count, "coverage": share, "sources": {}}
            for name, count, share in (("train", 191_204, 0.987), ("test", 52_110, 0.914))
        },
    }
    paths["coverage"] = [_write(root / "metrics" / "vocab.json", coverage)]
    result = compare(runs, timings, CompareSettings(resamples=500))
    paths["comparison"] = [_write(root / "report" / "compare.json", result)]
    return paths


def _prompt(index: int, rate: float, difficulty: float, rng: torch.Generator) -> PromptCounts:
    steps = 150
    at = rate * (0.6 + 0.8 * difficulty)
    positions = []
    left = steps
    for position in range(3):
        left = min(left, round(left * min(at * (1 + 0.15 * position), 1.0)))
        positions.append(left)
    return PromptCounts(
        id=f"{index:016x}",
        benchmark="mt_bench" if index < 80 else "human_eval",
        verify_steps=steps,
        drafted=3 * steps,
        accepted=sum(positions),
        accepted_per_position=positions,
        tokens=steps + sum(positions),
    )


def _curve(path: Path, rate: float, number: int, rng: torch.Generator) -> Path:
    steps = 400 + 150 * number
    lines = []
    for step in range(10, steps + 1, 10):
        done = 1 - math.exp(-step / 120)
        noise = float(torch.randn((), generator=rng)) * 0.05
        values = {
            "loss": 5.2 - 3 * done + noise,
            "accuracy_0": rate * done + noise / 8,
            "lr": 6e-4 * math.cos(step / steps * math.pi / 2),
        }
        if step % 80 == 0:
            values["dev_tau"] = 1 + 1.45 * rate * done
        lines += [json.dumps({"metric": n, "step": step, "value": v}) for n, v in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _stage(root: Path, stage: str, seconds: float) -> Path:
    notes = {"trained": {"steps": 400, "tokens": 400_000}} if stage.startswith("train") else {}
    return _write(
        root / "provenance" / f"{stage}.json",
        {
            "stage": stage, "seconds": seconds, "started": "2026-11-30T10:12:07Z",
            "commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True,
            "changed": ["params.yaml"], "python": "3.11.7", "processor": "A processor (amx_bf16)",
            "cores": 2, "threads": 2, "lock": "ab" * 32,
            "torch": {"version": "2.13.0+cpu", "instruction_set": "AVX512", "device": "cpu"},
            "mlflow_runs": [{"run_id": f"run-of-{stage}", "name": stage}] if notes else [],
            "notes": notes,
        },
    )  # fmt: skip


def _write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path
