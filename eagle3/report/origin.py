"""The report's sections on cost and origin: time by stage; code, machine, versions and runs."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from eagle3.report import charts, words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def costs(data: ReportData) -> Section | None:
    """Wall time of every stage."""
    seconds = {stage: data.seconds(stage) for stage in data.provenance}
    known = [(stage, value) for stage, value in seconds.items() if value is not None]
    if not known:
        return None
    known.sort(key=lambda item: -item[1])
    total = sum(value for _, value in known)
    items = [
        charts.Bar(stage.replace("_", " "), value, words.duration(value)) for stage, value in known
    ]
    told = ", ".join(f"{stage} {words.duration(value)}" for stage, value in known)
    chart = charts.bars(items, start=0, end=known[0][1], alt=f"Seconds by stage: {told}.")
    return Section(
        "costs", "What it cost", f"<p>{words.duration(total)} over all stages.</p>{chart}"
    )


def origin(data: ReportData) -> Section | None:
    """Code, machine, versions and runs behind the numbers."""
    if not data.provenance:
        return None
    every = list(data.provenance.values())
    newest = max(every, key=lambda item: str(item.get("started", "")))
    commits = sorted({str(item["commit"])[:12] for item in every if item.get("commit")})
    changed = sorted({name for item in every for name in item.get("changed") or []})
    torch = newest.get("torch") or {}
    torch_words = " ".join(
        str(torch[name]) for name in ("version", "instruction_set", "device") if torch.get(name)
    )
    pairs = [
        ("verifier", data.verifier or "–"),
        ("finished", str(newest.get("started", "–"))),
        ("commit", ", ".join(commits) or "not in git"),
        ("changed since that commit", ", ".join(changed) if changed else "nothing"),
        ("torch", torch_words or "–"),
        ("Python", str(newest.get("python", "–"))),
        ("processor", str(newest.get("processor", "–"))),
        ("threads", f"{newest.get('threads', '–')} of {newest.get('cores', '–')} cores"),
        ("lock file", str(newest.get("lock") or "–")[:16]),
    ]
    body = words.facts([(name, escape(value)) for name, value in pairs])
    runs = [
        [
            escape(stage),
            escape(str(item.get("started", "–"))),
            words.duration(item.get("seconds")),
            escape(", ".join(_run_ids(item))) or "–",
        ]
        for stage, item in sorted(data.provenance.items())
    ]
    stages = words.table(["stage", "started", "took", "MLflow run"], runs, caption="")
    body += words.folded("Stages and their MLflow runs", stages)
    return Section("origin", "Where it came from", body)


def _run_ids(item: Mapping[str, Any]) -> list[str]:
    """Of the runs that the store has given one."""
    return [run["run_id"] for run in item.get("mlflow_runs", []) if run.get("run_id")]
