"""The report's section on speed: whether an arm pays, and with how many drafts."""

from __future__ import annotations

from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData
from eagle3.report.section import Section


def speed(data: ReportData) -> Section | None:
    """Whether each arm pays, and with how many drafts it would pay most."""
    timed = [arm for arm in data.arms if arm in data.timings]
    if data.comparison is None or not timed:
        return None
    arms = data.comparison["arms"]
    rows = []
    for arm in timed:
        timing, result = data.timings[arm], arms[arm]
        rows.append(
            [
                escape(words.arm(arm)),
                f"{timing['plain_tokens_per_s']:.1f}",
                f"{timing['speculative_tokens_per_s']:.1f}",
                f"<strong>{timing['speedup']:.2f}×</strong>",
                f"{timing['r']:.2f}",
                f"{timing['c']:.3f}",
                f"{timing['break_even_tau']:.2f}",
                str(result["recommended_k"]) if result["recommended_k"] else "none",
            ]
        )
    first = data.timings[timed[0]]
    said = "".join(
        f"<li><strong>{escape(words.arm(arm))}</strong> is {escape(arms[arm]['words'])}.</li>"
        for arm in timed
    )
    head = ["arm", "plain tokens/s", "speculative tokens/s", "speed-up", "r", "c", "break-even τ"]
    body = f"<ul>{said}</ul>" + words.table(
        [*head, "best k"],
        rows,
        caption=(
            f"Real decoding of {first['prompts']} prompts × {first['max_tokens']} tokens in "
            f"{first['dtype']} on {first['device']}, k = {first['k']}, both ways in turns on each "
            "prompt, prompts' own passes included"
        ),
    )
    body += (
        "<p class='note'>r is the time to verify k + 1 tokens and c that of one draft, over the "
        "time to decode one token. Speculation pays when τ is above r + k·c, the break-even. "
        "Best k is modelled from these costs and from the acceptance at each position; it is no "
        "measurement.</p>"
    )
    speeds = {words.arm(arm): list(enumerate(arms[arm]["speedup_by_drafts"], 1)) for arm in timed}
    most = max(len(points) for points in speeds.values())
    if most > 1:
        modelled = words.table(
            ["arm", *(f"{k} draft{'s' if k > 1 else ''}" for k in range(1, most + 1))],
            [[escape(name), *(f"{s:.2f}×" for _, s in points)] for name, points in speeds.items()],
            caption="Modelled speed-up by number of drafts, prompts' own passes left out",
        )
        body += modelled
    return Section("speed", "Faster than no speculation?", body)
