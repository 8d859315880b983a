"""Which colour stands for which arm, all over the report."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.report import charts
from eagle3.report.data import ReportData


def tones(data: ReportData) -> dict[str, int]:
    """Every arm's colour, the same all over the report."""
    return {arm: number % charts.COLORS for number, arm in enumerate(data.arms)}


ARM_TONES = (1, 2, 3, 4, 5, 0)


def study_tones(data: ReportData, arms: Sequence[str]) -> dict[str, int]:
    """Those of a study's arms: the report's where it knows them, else by their order."""
    known = tones(data)
    return {
        arm: known.get(arm, ARM_TONES[index % len(ARM_TONES)]) for index, arm in enumerate(arms)
    }
