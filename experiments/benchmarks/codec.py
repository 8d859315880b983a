"""What hidden states in 8 bits save and cost: bytes, what rounding moves, and τ after training.

`python -m experiments.benchmarks.codec` in the project, after the pipeline. An arm's states, which
lie plainly, are written again under each codec. A drafter is trained on each, with the same seeds
and budget, and τ is replayed on the dev states as they lie plainly, whatever it was trained on.
Killed and called again, it goes on within the training that it was at.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eagle3.acceptance import ALL, PromptCounts
from eagle3.arm import open_states
from eagle3.codec import STORED
from eagle3.comparison import counts_of
from eagle3.conventions import Conventions
from eagle3.dataset import Document, StatesDataset
from eagle3.errors import HarnessError
from eagle3.seed_statistics import lengths_by_seed, paired_differences, t_interval
from eagle3.statistics import Counts
from eagle3.tracking import NullTracker
from eagle3.workspace import digest, write_json
from experiments.evidence import KEY, of_benchmark
from experiments.import_command import run as write_again
from experiments.project import project_root
from experiments.study.bench import Bench, BenchArm
from experiments.study.compare import LEVEL
from experiments.study.fixed import check_answers
from experiments.study.opening import prepare
from experiments.study.progress import say
from experiments.study.training import length, score, train_once

PLAIN = "none"


def under(bench: Bench, arm: BenchArm, codec: str) -> BenchArm:
    """The arm on its states in another codec; the dev answers that τ is replayed on stay plain.

    They lie in `.work/codec-…/`, where a killed run finds them again.
    """
    states = bench.root / arm.entry.states
    key = {"facts": bench.facts(arm)["data"], "codec": codec}
    folder = bench.root / ".work" / f"codec-{digest(key)[:16]}"
    if not folder.exists():
        write_again(
            verifier_path=str(bench.root / arm.entry.head), data_dir=states, output_dir=folder,
            val_ratio=0.0, conventions=Conventions(), codec=codec,
        )  # fmt: skip
    data = open_states(folder, arm.data.head, arm.data.vocabulary)
    place = folder.relative_to(bench.root).as_posix()
    return replace(
        arm,
        entry=arm.entry.model_copy(update={"states": place}),
        data=replace(data, dev=arm.data.dev),
    )


def bytes_per_row(folder: Path) -> float:
    """Of a folder of states, all that a row of its shards holds together."""
    size = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    return size / StatesDataset.open(folder).meta.rows


def row_errors(
    plain: Sequence[Document], stored: Sequence[Document], layers: Sequence[int]
) -> list[dict[str, Any]]:
    """How far rows come back from what they were, over their length, by state: mean and largest."""
    apart: dict[str, list[torch.Tensor]] = {}
    for one, other in zip(plain, stored, strict=True):
        for name, before, after in (
            *((f"layer {k}", one.aux[:, n], other.aux[:, n]) for n, k in enumerate(layers)),
            ("final", one.final, other.final),
        ):
            wide = before.float()
            moved = (after.float() - wide).norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-30)
            apart.setdefault(name, []).append(moved)
    whole = {name: torch.cat(parts) for name, parts in apart.items()}
    return [
        {"state": name, "mean": float(rows.mean()), "largest": float(rows.max())}
        for name, rows in whole.items()
    ]


def measure(bench: Bench, name: str, *, tokens: int, seeds: int) -> dict[str, Any]:
    """Trains and measures; what came of it as plain values.

    Raises:
        HarnessError: no such arm, its states are encoded already, or it has no dev answers that can
            be replayed.
    """
    arm = bench.arm(name)
    if arm.data.meta.codec != PLAIN:
        raise HarnessError(
            "nothing to compare a codec with",
            where=arm.entry.states,
            rule="states that lie plainly",
            got=f"codec {arm.data.meta.codec}",
            fix=f"extract.codec: {PLAIN}, and make repro",
        )
    bench.check_start(arm)
    check_answers(bench, arm, "dev")
    arms = {codec: arm if codec == PLAIN else under(bench, arm, codec) for codec in STORED}
    counts = {codec: _trained(bench, one, codec, tokens, seeds) for codec, one in arms.items()}
    layers, root = arm.data.meta.aux_layers, bench.root
    rows = []
    for codec, one in arms.items():
        states = root / one.entry.states
        row: dict[str, Any] = {
            "codec": codec,
            "bytes_per_row": bytes_per_row(states / "train"),
            "tau_by_seed": lengths_by_seed(counts[codec]),
        }
        if codec != PLAIN:
            differences = paired_differences(counts[PLAIN], counts[codec])
            row["errors"] = row_errors(arm.data.dev, StatesDataset.open(states / "dev"), layers)
            row["difference"] = {**asdict(t_interval(differences, LEVEL)), "by_seed": differences}
        rows.append(row)
    for codec, one in arms.items():
        if codec != PLAIN:
            shutil.rmtree(root / one.entry.states)
    return {
        "verifier": arm.data.head.config.verifier,
        "arm": name,
        "dtype": arm.data.meta.dtype,
        "hidden_size": arm.data.meta.hidden_size,
        "tokens": tokens,
        "seeds": seeds,
        "prompts": len(arm.data.dev),
        "k": bench.evaluate.k,
        "level": LEVEL,
        "codecs": rows,
    }


def _trained(bench: Bench, arm: BenchArm, codec: str, tokens: int, seeds: int) -> Counts:
    settings, how = arm.settings({}), bench.evaluate
    found: list[list[PromptCounts]] = []
    for seed in bench.seeds(seeds):
        drafter, _ = train_once(
            bench, arm, settings, seed=seed, tokens=tokens, tracker=NullTracker()
        )
        found.append(score(drafter, arm.data.dev, how.k, how.dtype))
        say(f"codec {codec}, seed {seed}: dev τ {length(found[-1]):.4f}")
    return counts_of(found, ALL)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", default="scratch", help="of params.yaml")
    parser.add_argument("--tokens", type=int, default=80_000, help="budget of each training")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each codec")
    parser.add_argument("--out", type=Path, default=Path("reports/codecs.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        for name, least in (("tokens", 1), ("seeds", 2)):
            if getattr(args, name) < least:
                raise HarnessError("too small", where=f"--{name}", rule=f"at least {least}",
                                   got=getattr(args, name))  # fmt: skip
        bench = prepare(project_root())
        result = measure(bench, args.arm, tokens=args.tokens, seeds=args.seeds)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2))
    arm = bench.arm(args.arm)
    read = {key: getattr(arm.entry, key) for key in ("init", "states", "head", "vocab")}
    trained = {"train": arm.settings({}).model_dump(mode="json")}
    told = argparse.Namespace(**vars(args), **read, **trained)
    result[KEY] = of_benchmark(__file__, told, threads=bench.run.threads)
    write_json(bench.root / args.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
