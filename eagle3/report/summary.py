"""The few numbers of a run that are kept beside the code and compared between commits."""

from __future__ import annotations

from typing import Any

from eagle3.report.data import ReportData

NO_DIFFERENCE = "no difference"


def summary(data: ReportData) -> dict[str, Any]:
    """`tau.<arm>.<benchmark>`, `speedup.<arm>`, `greedy_exact`, `compare`, `seconds.<stage>`.

    `compare.verdict` is the arm that accepts more, or `NO_DIFFERENCE`: a sentence would make
    `dvc metrics diff` too wide to read.
    """
    found: dict[str, Any] = {
        "tau": {
            arm: {
                **{name: round(group["tau"], 4) for name, group in values["benchmarks"].items()},
                "all": round(values["all"]["tau"], 4),
            }
            for arm, values in data.summaries.items()
        },
        "speedup": {arm: round(timing["speedup"], 3) for arm, timing in data.timings.items()},
        "greedy_exact": greedy_exact(data),
    }
    if data.comparison is not None:
        compared = data.comparison["comparison"]
        found["compare"] = {
            "arms": compared["arms"],
            **{name: round(compared[name], 4) for name in ("delta", "low", "high")},
            "verdict": compared["winner"] or NO_DIFFERENCE,
        }
    found["seconds"] = {
        stage: round(values["seconds"], 1)
        for stage, values in sorted(data.provenance.items())
        if "seconds" in values
    }
    return found


def greedy_exact(data: ReportData) -> dict[str, int]:
    """Prompts decoded greedily both ways, over all arms; how many came out equal, and the others,
    which parted at a near-tie."""
    every = [
        values["decode"]["exactness"] for values in data.summaries.values() if "decode" in values
    ]
    return {
        "prompts": sum(item["prompts"] for item in every),
        "equal": sum(item["equal"] for item in every),
        "near_ties": sum(len(item["near_ties"]) for item in every),
    }
