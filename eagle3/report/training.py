"""The report's section on training: curves of all arms."""

from __future__ import annotations

from eagle3.report import charts, words
from eagle3.report.colours import tones
from eagle3.report.data import ReportData
from eagle3.report.section import Section

CURVES = (
    ("dev_tau", "τ on dev prompts", "higher is better"),
    ("loss", "training loss", "lower is better"),
    ("accuracy_0", "first draft right, training rows", "share"),
    ("lr", "learning rate", "by optimizer step"),
)


def training(data: ReportData) -> Section | None:
    """Curves of all arms, one chart a metric."""
    if not data.curves:
        return None
    arms = [arm for arm in data.arms if arm in data.curves]
    colour = tones(data)
    figures = []
    for metric, title, note in CURVES:
        having = [arm for arm in arms if metric in data.curves[arm]]
        if not having:
            continue
        ends = ", ".join(
            f"{words.arm(arm)} ends at {data.curves[arm][metric][-1][1]:.3g}" for arm in having
        )
        chart = charts.lines(
            {arm: charts.thinned(data.curves[arm][metric]) for arm in having},
            [colour[arm] for arm in having],
            x_label="optimizer step",
            alt=f"{title} by optimizer step: {ends}.",
        )
        figures.append(words.figure(title, note, chart))
    if not figures:
        return None
    key = charts.legend([words.arm(arm) for arm in arms], [colour[arm] for arm in arms])
    return Section("training", "Training", f"{key}<div class='figures'>{''.join(figures)}</div>")
