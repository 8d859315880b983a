"""The report's section of sample texts: which of an answer's tokens were drafted, and how deep.

Greedy answers are the same for every arm, so that the arms can be laid one above the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from eagle3.report import words
from eagle3.report.data import ReportData, Text
from eagle3.report.section import Section

SHADES = 4  # classes d1 .. d4 of the page's style sheet; deeper drafts have the last
ORDINALS = ("first", "second", "third")


def texts(data: ReportData) -> Section | None:
    """For each benchmark the prompt in the middle: half of the others have more drafts accepted."""
    arms = [arm for arm in data.arms if data.texts.get(arm)]
    if not arms:
        return None
    by_arm = {arm: {text["id"]: text for text in data.texts[arm]} for arm in arms}
    chosen = middles(by_arm)
    if not chosen:
        return None
    deepest = max(max(by_arm[arm][name]["positions"]) for arm in arms for name in chosen)
    body = (
        "<p>What was decoded greedily, a shade stronger for each draft position; what has no shade "
        "is the verifier's own token. Of each benchmark's decoded prompts, the one in the middle "
        f"by accepted drafts.</p>{_key(deepest)}"
    )
    for name in chosen:
        first = by_arm[arms[0]][name]
        asked = f"<pre>{escape(first['prompt'])}</pre>"
        body += (
            f"<h3>{escape(words.benchmark(first['benchmark']))} <span>{escape(name)}</span></h3>"
            + words.folded("The prompt, as the verifier read it", asked)
            + "".join(_decoded(arm, by_arm[arm][name]) for arm in arms)
        )
    return Section("texts", "Sample texts", body)


def middles(by_arm: Mapping[str, Mapping[str, Text]]) -> list[str]:
    """Ids: of each benchmark the median by the share of drafted tokens, over all arms."""
    first = next(iter(by_arm.values()))
    groups: dict[str, list[tuple[float, str]]] = {}
    for name, text in first.items():
        found = [arm[name] for arm in by_arm.values() if name in arm]
        if len(found) == len(by_arm):
            share = sum(_drafted(item) / len(item["positions"]) for item in found)
            groups.setdefault(text["benchmark"], []).append((share, name))
    return [sorted(group)[len(group) // 2][1] for _, group in sorted(groups.items())]


def _decoded(arm: str, text: Text) -> str:
    depths = Counter(position for position in text["positions"] if position)
    told = ", ".join(f"{depths[depth]} {_ordinal(depth)}" for depth in sorted(depths))
    count = f"{_drafted(text)} of {len(text['positions'])} tokens drafted" + (
        f": {told}" if told else ""
    )
    return (
        f"<figure class='text'><figcaption>{escape(words.arm(arm))} <span>{count}</span>"
        f"</figcaption><p class='decoded'>{_spans(text['pieces'], text['positions'])}</p></figure>"
    )


def _spans(pieces: Sequence[str], positions: Sequence[int]) -> str:
    return "".join(map(_span, pieces, positions))


def _span(piece: str, position: int) -> str:
    if position == 0 or not piece:
        return escape(piece)
    shade = min(position, SHADES)
    return f'<span class="d{shade}" title="draft {position}">{escape(piece)}</span>'


def _key(deepest: int) -> str:
    items = "".join(
        f'<li><span class="d{depth} swatch-text">draft {depth}'
        f"{' or deeper' if depth == SHADES < deepest else ''}</span></li>"
        for depth in range(1, min(deepest, SHADES) + 1)
    )
    return f'<ul class="legend">{items}<li>no shade: the verifier’s own</li></ul>'


def _drafted(text: Text) -> int:
    return sum(position > 0 for position in text["positions"])


def _ordinal(depth: int) -> str:
    return ORDINALS[depth - 1] if depth <= len(ORDINALS) else f"{depth}th"
