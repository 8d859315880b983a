"""The report's section on the draft vocabulary: what a drafter can say at all."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def coverage(data: ReportData) -> Section | None:
    """What the draft vocabulary can say, and how much the answers repeat themselves."""
    arms = [arm for arm in data.arms if arm in data.summaries]
    parts = []
    if data.coverage is not None:
        splits = data.coverage["splits"]
        parts.append(
            words.table(
                ["split", "supervised tokens", "covered"],
                [
                    [
                        escape(name),
                        words.thousands(found["supervised"]),
                        words.percent(found["coverage"], 1),
                    ]
                    for name, found in splits.items()
                ],
                caption=(
                    f"Draft vocabulary of {words.thousands(data.coverage['size'])} tokens, chosen "
                    "from the training split"
                ),
            )
        )
    rows = []
    for arm in arms:
        groups = {**data.summaries[arm]["benchmarks"], "all": data.summaries[arm]["all"]}
        shares = [
            f"{words.benchmark(name)} {words.percent(group['vocabulary_coverage'], 1)}"
            for name, group in groups.items()
            if "vocabulary_coverage" in group
        ]
        if shares:
            rows.append([escape(words.arm(arm)), escape(", ".join(shares))])
    if rows:
        parts.append(
            words.table(["arm", "covered"], rows, caption="Test answers, by each arm's vocabulary")
        )
    if not parts:
        return None
    text = (
        "<p>A drafter never proposes a token outside its vocabulary: what is not covered here is a "
        "step that ends.</p>"
    )
    if arms and "distinct_trigrams" in data.summaries[arms[0]]["all"]:
        share = data.summaries[arms[0]]["all"]["distinct_trigrams"]
        text += (
            f"<p>{words.percent(share)} of the trigrams within a test answer are distinct. Answers "
            "that repeat themselves are easy to draft and lift τ.</p>"
        )
    return Section("coverage", "Draft vocabulary", text + "".join(parts))
