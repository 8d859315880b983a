"""Training speed, memory and end loss beside the PyPI package `speculators`: `make bench-train`.

Both train the same first weights on the same batches with AdamW at one learning rate, 3 TTT steps,
in processes of their own that take turns round by round, on two threads. One scorer in float32
then says what each came to on documents that neither has seen: the mean soft cross-entropy over
supervised rows, summed over the TTT steps. Two kinds of documents, for what is won depends on them:
one made up from a seed fills each batch, nearly all of its rows supervised; real ones (`--states`,
`--head`, `--vocab`) are packed, prompts unsupervised, as people train. This trainer also runs alone
on made-up ones of a length that the other, whose attention mask grows with the square of it, is
spared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3.objective import objective
from eagle3.packing import pack, packed_order
from eagle3.workspace import write_json
from experiments.benchmarks.rounds import Measured
from experiments.benchmarks.speculators_model import VERSION
from experiments.benchmarks.training_task import Source, Task, made_up, read_task, real, write_task
from experiments.evidence import KEY, of_benchmark
from stages.provenance import processor, torch_build

ROOT = Path(__file__).parents[2]
MODULES = {"eagle3": "train_eagle3", "speculators": "train_speculators"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is run. The first round of each process warms up and is not counted."""

    rounds: int
    steps: int
    long_steps: int
    threads: int
    lr: float


def measure(
    folder: Path, pythons: dict[str, str], rounds: int, threads: int
) -> dict[str, list[dict[str, float]]]:
    """Rounds of each trainer on the task in `folder`, in turns, the first one left out.

    Leaves `<trainer>.safetensors` beside the task.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    children = {}
    for name, python in pythons.items():
        module, out = f"experiments.benchmarks.{MODULES[name]}", folder / f"{name}.safetensors"
        command = [python, "-m", module, str(folder), str(out)]
        children[name] = Measured(command, env=env, cwd=ROOT, log=folder / f"{name}.log")
    reports: dict[str, list[dict[str, float]]] = {name: [] for name in children}
    try:
        for number in range(rounds):
            # Turn about, so that a machine that slows down slows both.
            for name in list(children)[:: 1 if number % 2 else -1]:
                reports[name].append(children[name].round())
        for child in children.values():
            child.finish()
    finally:
        for child in children.values():
            child.stop()
    return {name: found[1:] for name, found in reports.items()}


@torch.no_grad()
def score(task: Task, weights: dict[str, torch.Tensor]) -> float:
    """Loss on the held-out documents in float32, of every TTT step alike."""
    drafter = task.drafter(weights)
    settings, held_out = task.settings, task.held_out
    lengths = [len(document.token_ids) for document in held_out]
    sums = torch.zeros(settings.objective.ttt_steps)
    rows = torch.zeros_like(sums)
    for indices in packed_order(
        lengths, settings.batch_tokens, settings.max_length, seed=0, epoch=0
    ):
        outcome = objective(
            drafter,
            pack([held_out[i] for i in indices], settings.max_length),
            task.data.head,
            task.data.vocabulary,
            settings.objective,
            dtype=torch.float32,
            measure=False,
        )
        counts = torch.tensor(outcome.rows)
        sums += torch.stack(outcome.losses) * counts
        rows += counts
    return float((sums / rows).sum())


def run_length(
    folder: Path, source: Source, length: int, pythons: dict[str, str], plan: Plan
) -> tuple[list[dict[str, Any]], float]:
    """One row for each trainer, and the loss of the first weights."""
    rounds = plan.rounds + 1
    write_task(folder, source, length=length, rounds=rounds, round_steps=plan.steps, lr=plan.lr)
    reports = measure(folder, pythons, rounds, plan.threads)
    task = read_task(folder)
    rows = []
    for name, found in reports.items():
        # One rate a round: batches of real documents differ in size.
        wall, cpu = (
            [
                tokens / report[key]
                for tokens, report in zip(task.round_tokens[1:], found, strict=True)
            ]
            for key in ("wall_s", "cpu_s")
        )
        rows.append(
            {
                "trainer": name,
                "length": length,
                "tokens_per_s": round(statistics.median(wall), 1),
                "tokens_per_cpu_s": round(statistics.median(cpu), 1),
                "peak_rss_gib": round(max(report["peak_rss"] for report in found) / 2**30, 3),
                "loss": round(score(task, load_file(folder / f"{name}.safetensors")), 5),
                "tokens": sum(task.round_tokens),
                "tokens_per_s_of_rounds": [round(rate, 1) for rate in wall],
                "tokens_per_cpu_s_of_rounds": [round(rate, 1) for rate in cpu],
            }
        )
    return rows, score(task, {})


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and length that both ran: how many times as fast this trainer is, by medians."""
    by_key = {(row["trainer"], row["documents"], row["length"]): row for row in rows}
    found = []
    for (name, documents, length), mine in by_key.items():
        theirs = by_key.get(("speculators", documents, length))
        if name != "eagle3" or theirs is None:
            continue
        line: dict[str, Any] = {"documents": documents, "length": length}
        for key in ("tokens_per_s", "tokens_per_cpu_s"):
            ratios = [
                a / b
                for a, b in zip(mine[f"{key}_of_rounds"], theirs[f"{key}_of_rounds"], strict=True)
            ]
            line[f"{key}_ratio"] = round(statistics.median(ratios), 3)
        line["peak_rss_ratio"] = round(mine["peak_rss_gib"] / theirs["peak_rss_gib"], 3)
        line["loss_difference"] = round(mine["loss"] - theirs["loss"], 5)
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="of an environment with speculators")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--long", type=int, default=8192, help="run by this trainer alone; 0: not")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a round")
    parser.add_argument("--long-steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--states", type=Path, help="real documents too: a folder of states")
    parser.add_argument("--head", type=Path, help="of their verifier")
    parser.add_argument("--vocab", type=Path, help="draft vocabulary")
    args = parser.parse_args()
    given = [args.states, args.head, args.vocab]
    if any(given) and not all(given):
        parser.error("--states, --head and --vocab go together")
    plan = Plan(
        rounds=args.rounds, steps=args.steps, long_steps=args.long_steps, threads=args.threads,
        lr=args.lr,
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    both = {"eagle3": sys.executable, "speculators": args.peer_python}
    runs = [("made up", length) for length in args.lengths]
    if all(given):
        runs += [("real", length) for length in args.lengths]
    if args.long:
        runs.append(("made up", args.long))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (kind, length) in enumerate(runs):
            alone = length == args.long
            found, first_loss = run_length(
                Path(folder) / str(number),
                real(*given) if kind == "real" else made_up(length),
                length,
                {"eagle3": sys.executable} if alone else both,
                replace(plan, rounds=2, steps=plan.long_steps) if alone else plan,
            )
            for row in found:
                row = {"documents": kind, "first_loss": round(first_loss, 5)} | row
                print({name: value for name, value in row.items() if "rounds" not in name})
                rows.append(row)
    result: dict[str, Any] = {
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": args.threads,
            "torch": torch_build(),
            "speculators": VERSION,
        },
        "plan": asdict(plan),
        "rows": rows,
        "compared": compared(rows),
    }
    print(result["compared"])
    result[KEY] = of_benchmark(__file__, args, threads=args.threads)
    write_json(args.out, result)


if __name__ == "__main__":
    main()
