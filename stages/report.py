"""What all stages wrote -> the report, and the numbers that are kept beside the code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.report.data import ReportData, read_data
from eagle3.report.page import ReportSettings, render
from eagle3.report.summary import summary
from eagle3.tracking import flatten
from eagle3.workspace import write_atomically, write_json
from stages import notes
from stages.dvc_files import read_lock
from stages.lineage import Lineage
from stages.models import register, results
from stages.pages import log_table, write_plots
from stages.runner import Stage, run_stage
from stages.tracking import resolve_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def several(name: str, text: str) -> None:
        parser.add_argument(name, type=Path, nargs="*", default=[], help=text)

    parser.add_argument("--comparison", type=Path, help="what the compare stage wrote")
    several("--summaries", "counts: ARM.json ...")
    several("--timings", "speeds: ARM.timing.json ...")
    several("--prompts", "counts by prompt: ARM.jsonl ...")
    several("--texts", "decoded texts: ARM.texts.jsonl ...")
    several("--curves", "training curves: ARM.curve.jsonl ...")
    parser.add_argument("--coverage", type=Path, help="of the draft vocabulary")
    parser.add_argument("--parity", type=Path, help="verdict on the hidden states")
    parser.add_argument("--mistakes", type=Path, help="τ under wrong conventions")
    several("--stages", "provenance: STAGE.json ...")
    for name in ("--study", "--calibration", "--crossover"):
        parser.add_argument(name, type=Path, help="what `eagle3 study` found, where it has run")
    parser.add_argument("--scaling", type=Path, help="what `eagle3 scaling` found")
    parser.add_argument("--engines", type=Path, help="engines side by side")
    parser.add_argument("--trainers", type=Path, help="the training benchmark")
    parser.add_argument("--codecs", type=Path, help="the benchmark of how states are stored")
    parser.add_argument("--out", type=Path, required=True, help="HTML")
    parser.add_argument("--metrics", type=Path, required=True, help="the summary, JSON")
    parser.add_argument("--plots", type=Path, required=True, help="curves for `dvc plots`, folder")


def lineage_of(lineage: Lineage | None, comparison: Path | None) -> list[dict[str, Any]]:
    """The chain behind the comparison, as the report draws it; empty where DVC did not make it."""
    made = {out for entry in lineage.lock.values() for out in entry.outs} if lineage else set()
    if lineage is None or comparison is None or str(comparison) not in made:
        return []
    return [
        {
            "stage": step.stage,
            "needs": sorted({maker for _, maker in step.needs.values() if maker}),
            "digest": next(iter(step.outs.values()), ""),
            "runs": step.runs,
            "reused": step.reused,
        }
        for step in lineage.chain(lineage.find(str(comparison)).entry)
    ]


# By argument, what one file alone is shown of.
ALONE = (
    *("comparison", "coverage", "parity", "mistakes", "study", "calibration", "crossover"),
    *("scaling", "engines", "trainers", "codecs"),
)


def page(data: ReportData, settings: ReportSettings, args: argparse.Namespace) -> str:
    """The report.

    Raises:
        HarnessError: a file is JSON, but not what its writer writes: names it.
    """
    try:
        return render(data, settings)
    except HarnessError:
        raise
    except Exception:
        for name in ALONE:
            try:
                render(ReportData(**{name: getattr(data, name)}), settings)
            except Exception as error:  # whatever a section makes of what it did not expect
                raise HarnessError(
                    "a file cannot be shown in the report",
                    where=getattr(args, name),
                    rule="what the stage or command that writes it puts there",
                    got=f"{type(error).__name__}: {error}",
                    fix="run that again; a file below reports/ may also be taken away",
                ) from None
        raise


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(ReportSettings, "report")
    lock = read_lock(stage.root)
    lineage = Lineage(stage.root, lock) if lock else None
    data = read_data(
        comparison=args.comparison,
        summaries=args.summaries,
        timings=args.timings,
        curves=args.curves,
        texts=args.texts,
        coverage=args.coverage,
        parity=args.parity,
        mistakes=args.mistakes,
        provenance=args.stages,
        study=args.study,
        calibration=args.calibration,
        crossover=args.crossover,
        scaling=args.scaling,
        engines=args.engines,
        trainers=args.trainers,
        codecs=args.codecs,
        lineage=lineage_of(lineage, args.comparison),
    )
    write_atomically(args.out, page(data, settings, args))
    numbers = summary(data)
    write_json(args.metrics, numbers)
    write_plots(args.plots, data.curves)
    tracker = stage.tracker("report", {"kind": "report"})
    flat = flatten(numbers)
    tracker.log_metrics({n: v for n, v in flat.items() if isinstance(v, int | float)}, 0)
    tracker.log_tags({notes.TAG: f"{_verdict(data)}\n\nThe report is under Artifacts."})
    tracker.log_artifact(args.out)
    log_table(tracker, args.prompts)
    if lineage is not None:
        register(resolve_store(stage.root), lineage, results(numbers))


def _verdict(data: ReportData) -> str:
    if data.comparison is None:
        return "One report of several runs."
    return str(data.comparison["comparison"]["verdict"])


if __name__ == "__main__":
    run_stage("report", main, add_arguments)
