"""Hidden states -> a drafter checkpoint of one arm, and its training curve."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from eagle3.arm import ArmSettings, arm_settings, init_digest, open_states, train_arm
from eagle3.machine import keep_freed_memory
from eagle3.ranks import joined
from eagle3.reading import read_object
from eagle3.tracking import flatten
from eagle3.verifier_head import read_head
from eagle3.vocab import read_vocabulary
from eagle3.workspace import digest_file, publish, write_atomically
from stages import notes
from stages.params import read_params, section_values
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", required=True, help="entry of `arms` in params.yaml")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--parity", type=Path, required=True, help="verdict on the states")
    parser.add_argument("--curve", type=Path, required=True, help="metrics by step, JSON lines")


def main(stage: Stage, args: argparse.Namespace) -> None:
    where = f"{stage.params_path}, arms.{args.arm}.train over train"
    arm = stage.section(ArmSettings, f"arms.{args.arm}")
    shared = section_values(read_params(stage.params_path), "train", where=stage.params_path)
    settings = arm_settings(shared, arm.train, where=where)
    parity = str(read_object(args.parity, fix="run the parity stage").get("words"))
    stage.note("parity", parity)
    head = read_head(Path(arm.head))
    vocabulary = read_vocabulary(Path(arm.vocab), vocab_size=head.config.vocab_size)
    data = open_states(Path(arm.states), head, vocabulary)
    init = init_digest(Path(arm.init))
    keep_freed_memory()
    key = {
        "arm": arm.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json"),
        "run": stage.run.model_dump(mode="json"),
        "states": {
            str(path): digest_file(path) for path in sorted(Path(arm.states).glob("*/index.jsonl"))
        },
        "head": digest_file(Path(arm.head)),
        "vocab": digest_file(Path(arm.vocab)),
        "init": init,
        "torch": torch.__version__,
    }
    with joined(stage.run.device) as stage.ranks, stage.work(key) as work:
        tracker = stage.tracker(
            f"train {args.arm}", {"arm": args.arm, "kind": "train", "parity": parity}
        )
        tracker.log_params(
            flatten({"arm": arm.model_dump(exclude={"train"}), **settings.model_dump()})
        )
        tracker.log_params({"seed": stage.run.seed, "threads": stage.run.threads})
        training = notes.Training(
            name=args.arm,
            init=None if Path(arm.init).is_file() else Path(arm.init),
            verifier=data.meta.verifier,
            states=Path(arm.states),
            documents=len(data.lengths),
            budget=notes.budget(arm.tokens, arm.epochs),
            lr=settings.lr,
            ttt_steps=settings.objective.ttt_steps,
        )
        training.tell_begin(tracker)
        result = train_arm(
            Path(arm.init),
            data,
            settings,
            seed=stage.run.seed,
            tokens=arm.tokens,
            epochs=arm.epochs,
            device=stage.run.device,
            work=work,
            tracker=tracker,
            init_layers=arm.init_layers,
            ranks=stage.ranks,
        )
        if not stage.ranks.leads:
            return
        lines = [
            json.dumps({"metric": name, "step": step, "value": value})
            for name, step, value in result.history
        ]
        write_atomically(args.curve, "\n".join(lines) + "\n")
        training.tell_end(tracker, result, {"checkpoint": args.out, "curve": args.curve})
        trained = {"steps": result.steps, "tokens": result.tokens}
        stage.note("trained", trained | {"stopped_early": result.stopped_early})
        stage.note("processes", stage.ranks.count)
        publish(work / "checkpoint", args.out)


if __name__ == "__main__":
    run_stage("train", main, add_arguments)
