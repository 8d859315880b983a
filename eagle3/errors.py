"""The one error that people are meant to read.

Knows nothing of command lines: whoever starts a program turns it into a message and exit code 2.
"""

from __future__ import annotations

LONGEST = 2000  # characters of a fact: a value received may be a file's worth


class HarnessError(Exception):
    """A mistake that the person at the keyboard can correct.

    Args:
        what: what is wrong, in one clause.
        where: file, key, line or sample it is wrong in.
        rule: what would have been right.
        got: the value received.
        fix: the way out.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        rule: object | None = None,
        got: object | None = None,
        fix: str | None = None,
    ) -> None:
        lines = [what]
        lines += [
            f"  {name}: {_cut(str(value))}"
            for name, value in (("where", where), ("rule", rule), ("got", got), ("fix", fix))
            if value is not None
        ]
        super().__init__("\n".join(lines))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
