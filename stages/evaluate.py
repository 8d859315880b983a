"""A drafter checkpoint -> its acceptance on the test prompts, its exactness and its speed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.acceptance import ALL, PromptCounts, acceptance_length, write_counts
from eagle3.dataset import StatesDataset
from eagle3.decoded_texts import Detokenizer, pieces, positions, write_texts
from eagle3.evaluate import (
    EvaluateSettings,
    Subject,
    acceptance_summary,
    check_states,
)
from eagle3.local_decoding import (
    Exactness,
    Prompt,
    exact_decoding,
    exact_logits,
    spread_prompts,
    timed_decoding,
)
from eagle3.machine import keep_freed_memory
from eagle3.replay import replay
from eagle3.served_decoding import (
    decode_served,
    served_counts,
    served_speed,
    serving_engine,
)
from eagle3.tracking import flatten
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head
from eagle3.verifier_model import load_tokenizer
from eagle3.workspace import write_json
from stages import notes
from stages.runner import Stage, run_stage
from stages.tables import Table, log_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", required=True, help="name of the drafter in all results")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--verifier", required=True, help="folder or hub id")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--states", type=Path, required=True, help="states of test prompts")
    parser.add_argument("--summary", type=Path, required=True, help="counts in all, JSON")
    parser.add_argument("--prompts", type=Path, required=True, help="counts by prompt, JSON lines")
    parser.add_argument("--timing", type=Path, required=True, help="speeds, JSON")
    parser.add_argument(
        "--texts", type=Path, required=True, help="decoded texts with accepted drafts, JSON lines"
    )


def texts_of(
    tokenizer: Detokenizer, states: StatesDataset, prompts: Sequence[Prompt], exact: Exactness
) -> list[dict[str, Any]]:
    """What was decoded greedily in fp32, token by token, with the draft that each came from."""
    benchmarks = dict(zip(states.ids, states.sources, strict=True))
    return [
        {
            "id": prompt.id,
            "benchmark": benchmarks[prompt.id],
            "prompt": "".join(pieces(tokenizer, prompt.token_ids)),
            "pieces": pieces(tokenizer, decoded.token_ids),
            "positions": positions(decoded.accepted_per_step, len(decoded.token_ids)),
        }
        for prompt, decoded in zip(prompts, exact.speculative, strict=True)
    ]


def tables_of(
    counts: Sequence[PromptCounts], texts: Sequence[Mapping[str, Any]]
) -> dict[str, Table]:
    """The evaluation by prompt, for MLflow's page.

    That page groups by the first column and compares the second one between runs.
    """
    head = ["prompt", "tau", "benchmark", "steps", "tokens"]
    positions = len(counts[0].accepted_per_position)
    return {
        "acceptance_by_prompt": Table(
            [*head, *(f"accepted at {i + 1}" for i in range(positions))],
            [
                [
                    *(item.id, acceptance_length(item.accepted, item.verify_steps), item.benchmark),
                    *(item.verify_steps, item.tokens, *item.accepted_per_position),
                ]
                for item in counts
            ],
        ),
        "decoded_texts": Table(
            ["prompt", "answer", "asked", "benchmark", "accepted drafts", "tokens"],
            [
                [
                    *(item["id"], "".join(item["pieces"]), item["prompt"], item["benchmark"]),
                    *(sum(map(bool, item["positions"])), len(item["positions"])),
                ]
                for item in texts
            ],
        ),
    }


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(EvaluateSettings, "evaluate")
    spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
    head = read_head(args.head)
    subject = Subject(spec, head, args.checkpoint, stage.run.device)
    states = StatesDataset.open(args.states)
    check_states(states, subject, settings.k)
    prompts = spread_prompts(states, settings.decode_prompts)
    tokenizer = load_tokenizer(spec)
    engine = serving_engine(subject, prompts, settings, stage.root / ".work" / f"served-{args.arm}")
    keep_freed_memory()

    tracker = stage.tracker(f"evaluate {args.arm}", {"arm": args.arm, "kind": "evaluate"})
    tracker.log_params(flatten({"arm": args.arm, "evaluate": settings.model_dump()}))
    dtype = getattr(torch, settings.dtype)
    drafter = subject.drafter(dtype)
    counts = replay(drafter, states, settings.k, dtype=dtype)
    summary = acceptance_summary(counts, states, drafter)
    tracker.log_metrics({f"tau.{name}": group["tau"] for name, group in summary.items()}, 0)
    exact = exact_decoding(subject, prompts, settings)
    timing = timed_decoding(subject, prompts, settings, seed=stage.run.seed)
    speeds = ("speedup", "speedup_decoding", "r", "c", "break_even_tau", "plain_tokens_per_s")
    tracker.log_metrics({name: timing[name] for name in speeds}, 0)

    served: dict[str, Any] = {}
    if engine is not None:
        answers = decode_served(engine, subject, prompts, settings)
        served = {
            "served": served_counts(
                answers, prompts, exact.speculative, settings.k, exact_logits(subject)
            )
        }
        timing = {**timing, "served": served_speed(answers)}
        tracker.log_metrics({f"tau.{engine.name}": served["served"]["tau"]}, 0)

    everything = summary.pop(ALL)
    said = notes.evaluation(
        args.arm,
        checkpoint=args.checkpoint,
        verifier=head.config.verifier,
        overall=everything,
        benchmarks=summary,
        timing=timing,
        exactness=exact.summary()["exactness"],
        outputs={
            "summary": args.summary,
            "counts by prompt": args.prompts,
            "speeds": args.timing,
            "decoded texts": args.texts,
        },
    )
    tracker.log_tags({notes.TAG: said})
    write_counts(args.prompts, counts)
    texts = texts_of(tokenizer, states, prompts, exact)
    write_texts(args.texts, texts)
    write_json(args.timing, {"arm": args.arm, **timing})
    write_json(
        args.summary,
        {
            "arm": args.arm,
            "verifier": head.config.verifier,
            "k": settings.k,
            "dtype": settings.dtype,
            "benchmarks": summary,
            ALL: everything,
            "decode": exact.summary(),
            **served,
        },
    )
    tracker.log_artifact(args.summary)
    log_tables(tracker, tables_of(counts, texts))


if __name__ == "__main__":
    run_stage("evaluate", main, add_arguments)
