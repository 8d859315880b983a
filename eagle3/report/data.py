"""What a report is made of: the stages' JSON files, as far as they are there.

Nothing here fails for a missing file: the sections that need it are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import HarnessError
from eagle3.reading import read_lines, read_object

Curve = dict[str, list[tuple[int, float]]]  # metric -> (step, value), ascending
Text = Mapping[str, Any]  # id, benchmark, prompt, pieces, positions: see eagle3.decoded_texts


@dataclass(frozen=True)
class ReportData:
    """Inputs of the report, by arm or stage.

    Attributes:
        comparison: what the compare stage wrote; None leaves out everything that compares.
        summaries, timings, curves, texts: by arm.
        coverage: of the draft vocabulary, as the vocab stage wrote it.
        parity: whether the hidden states are what serving sees, as the parity stage wrote it.
        mistakes: one drafter under wrong conventions, as the mistakes stage wrote it.
        provenance: by stage.
        study, calibration, crossover: what `eagle3 study`, its `aa` and its `crossover` found.
        scaling: what `eagle3 scaling` found.
        engines, trainers, codecs: what the benchmarks of engines, of training and of how states
            are stored measured.
        lineage: the stages behind the comparison, each before those that it `needs`, with `stage`,
            `digest`, `runs` and `reused`.
    """

    comparison: Mapping[str, Any] | None = None
    summaries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    texts: Mapping[str, Sequence[Text]] = field(default_factory=dict)
    coverage: Mapping[str, Any] | None = None
    parity: Mapping[str, Any] | None = None
    mistakes: Mapping[str, Any] | None = None
    provenance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    study: Mapping[str, Any] | None = None
    calibration: Mapping[str, Any] | None = None
    crossover: Mapping[str, Any] | None = None
    scaling: Mapping[str, Any] | None = None
    engines: Mapping[str, Any] | None = None
    trainers: Mapping[str, Any] | None = None
    codecs: Mapping[str, Any] | None = None
    lineage: Sequence[Mapping[str, Any]] = ()

    @property
    def compared(self) -> list[str]:
        """The two compared arms."""
        return list(self.comparison["comparison"]["arms"]) if self.comparison else []

    @property
    def arms(self) -> list[str]:
        """All arms: what the compared ones start from first, then those, then the others."""
        known = list(self.comparison["arms"]) if self.comparison else []
        known += [name for name in [*self.summaries, *self.curves] if name not in known]
        first = [name for name in known if name == "base"]
        return (
            first
            + [name for name in self.compared if name in known]
            + [name for name in known if name not in (*first, *self.compared)]
        )

    @property
    def verifier(self) -> str | None:
        """Its name, where evaluation tells it."""
        return next((item["verifier"] for item in self.summaries.values()), None)

    def seconds(self, stage: str) -> float | None:
        """Wall time of a stage."""
        value = self.provenance.get(stage, {}).get("seconds")
        return None if value is None else float(value)

    def notes(self, stage: str) -> Mapping[str, Any]:
        """What a stage noted beside its results."""
        found: Mapping[str, Any] = self.provenance.get(stage, {}).get("notes", {})
        return found

    def training(self, arm: str) -> Mapping[str, Any]:
        """What provenance says of an arm's training: seconds, steps, tokens."""
        found = self.provenance.get(f"train@{arm}")
        if found is None:
            return {}
        return {"seconds": found.get("seconds"), **found.get("notes", {}).get("trained", {})}


def read_data(
    *,
    comparison: Path | None = None,
    summaries: Sequence[Path] = (),
    timings: Sequence[Path] = (),
    curves: Sequence[Path] = (),
    texts: Sequence[Path] = (),
    coverage: Path | None = None,
    parity: Path | None = None,
    mistakes: Path | None = None,
    provenance: Sequence[Path] = (),
    study: Path | None = None,
    calibration: Path | None = None,
    crossover: Path | None = None,
    scaling: Path | None = None,
    engines: Path | None = None,
    trainers: Path | None = None,
    codecs: Path | None = None,
    lineage: Sequence[Mapping[str, Any]] = (),
) -> ReportData:
    """Reads what is there; a file's name up to the first dot is its arm, its stem its stage.

    What studies and codecs came to with another verifier than the summaries' is left out.
    """
    read = {_arm(path): _json(path) for path in _there(summaries)}
    verifiers = {item.get("verifier") for item in read.values()}

    def found(path: Path | None) -> dict[str, Any] | None:
        item = _some(path)
        whose = None if item is None else item.get("verifier")
        return None if verifiers and whose is not None and whose not in verifiers else item

    return ReportData(
        comparison=_some(comparison),
        summaries=read,
        timings={_arm(path): _json(path) for path in _there(timings)},
        curves={_arm(path): read_curve(path) for path in _there(curves)},
        texts={_arm(path): [text for _, text in read_lines(path)] for path in _there(texts)},
        coverage=_some(coverage),
        parity=_some(parity),
        mistakes=_some(mistakes),
        provenance={path.stem: _json(path) for path in _there(provenance)},
        study=found(study),
        calibration=found(calibration),
        crossover=found(crossover),
        scaling=found(scaling),
        engines=_some(engines),
        trainers=_some(trainers),
        codecs=found(codecs),
        lineage=lineage,
    )


def read_curve(path: Path) -> Curve:
    """Lines of {"metric", "step", "value"} as one series a metric.

    Raises:
        HarnessError: names file and line of what cannot be read.
    """
    curve: Curve = {}
    for number, item in read_lines(path):
        try:
            curve.setdefault(item["metric"], []).append((int(item["step"]), float(item["value"])))
        except (ValueError, KeyError, TypeError) as error:
            raise HarnessError(
                "not a line of a training curve",
                where=f"{path}:{number}",
                rule="metric, step, value",
                got=error,
                fix="run the train stage again",
            ) from None
    return {name: sorted(points) for name, points in curve.items()}


def _there(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if path.is_file()]


def _arm(path: Path) -> str:
    return path.name.split(".")[0]


def _some(path: Path | None) -> dict[str, Any] | None:
    return _json(path) if path is not None and path.is_file() else None


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, fix="run the stage or command again that writes it")
