"""Whether two files hold the same: tensor by tensor, key by key, or byte by byte.

Knows nothing of pipelines. A difference is named by the first tensor, key or byte where it shows.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BITWISE, WITHIN, DIFFERENT, NOT_COMPARED, UNKNOWN = (
    *("bitwise", "within tolerance", "different", "not compared"),
    "unknown",  # other bytes, which may be allowed to be others
)
_ABSENT = object()


@dataclass(frozen=True)
class Verdict:
    """`first`: where it differs first, in words; empty where it is bitwise."""

    state: str
    first: str = ""


def tolerance_of(name: str, tolerances: Mapping[str, float | None]) -> float | None:
    """The tolerance of the first pattern that fits; 0 where none does, None: never compared.

    Args:
        name: `path:key`, as `metrics/base.json:all.tau`.
    """
    for pattern, tolerance in tolerances.items():
        if fnmatch.fnmatchcase(name, pattern):
            return tolerance
    return 0.0


def without_the_recorded(name: str, tolerances: Mapping[str, float | None]) -> Verdict:
    """On a file or folder of other bytes than those recorded, which are no longer at hand."""
    if tolerance_of(f"{name}:", tolerances) is None:
        return Verdict(NOT_COMPARED)
    partly = any(fnmatch.fnmatchcase(name, pattern.partition(":")[0]) for pattern in tolerances)
    return Verdict(
        UNKNOWN if partly else DIFFERENT, "other bytes than those of dvc.lock, which are not here"
    )


def compare_files(
    recorded: Path, made: Path, name: str, tolerances: Mapping[str, float | None]
) -> Verdict:
    """Two files under the name that tolerances speak of.

    Tensors are compared by name, dtype, shape and bytes: the order in which a file holds them is
    no difference. A number passes when it is within its absolute tolerance.
    """
    if made.suffix == ".safetensors":  # what is recorded comes out of a cache, without a suffix
        return _tensors(recorded, made)
    if made.suffix in (".json", ".jsonl"):
        return _values(_read(recorded, made.suffix), _read(made, made.suffix), name, tolerances)
    if tolerance_of(f"{name}:", tolerances) is None:
        return Verdict(NOT_COMPARED)
    return _bytes(recorded, made)


def _read(path: Path, suffix: str) -> Any:
    text = path.read_text()
    if suffix == ".json":
        return json.loads(text)
    return {f"line {n}": json.loads(line) for n, line in enumerate(text.splitlines(), 1)}


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items: Any = None
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    if not items:
        yield at, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{at}.{key}" if at else str(key))


def _values(one: Any, other: Any, name: str, tolerances: Mapping[str, float | None]) -> Verdict:
    left, right = dict(_leaves(one)), dict(_leaves(other))
    state, first, compared = BITWISE, "", False
    for key in {**left, **right}:
        tolerance = tolerance_of(f"{name}:{key}", tolerances)
        if tolerance is None:
            continue
        compared = True
        a, b = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if _same(a, b):
            continue
        said = f"{key}: {_words(a)}, now {_words(b)}"
        if not _near(a, b, tolerance):
            return Verdict(DIFFERENT, said)
        state, first = WITHIN, first or said
    return Verdict(state, first) if compared or not (left or right) else Verdict(NOT_COMPARED)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and bool(a == b)


def _near(a: Any, b: Any, tolerance: float) -> bool:
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return numbers and abs(a - b) <= tolerance


def _words(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)


def _tensors(recorded: Path, made: Path) -> Verdict:
    import torch
    from safetensors import safe_open

    with safe_open(recorded, "pt") as a, safe_open(made, "pt") as b:
        ours, theirs = set(a.keys()), set(b.keys())
        for name in sorted(ours | theirs):
            if name not in ours & theirs:
                return Verdict(DIFFERENT, f"tensor {name} is in one of them only")
            x, y = a.get_tensor(name), b.get_tensor(name)
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return Verdict(
                    DIFFERENT,
                    f"tensor {name}: {x.dtype} {list(x.shape)}, now {y.dtype} {list(y.shape)}",
                )
            if not torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (x, y))):
                apart = (x.double() - y.double()).abs()
                return Verdict(
                    DIFFERENT,
                    f"tensor {name}: {int((apart != 0).sum())} of {x.numel()} values, "
                    f"by {float(apart.max()):.3g} at most",
                )
        if a.metadata() != b.metadata():
            return Verdict(DIFFERENT, "tensors are the same, the file's metadata is not")
    return Verdict(BITWISE)


def _bytes(recorded: Path, made: Path) -> Verdict:
    a, b = recorded.read_bytes(), made.read_bytes()
    if a == b:
        return Verdict(BITWISE)
    at = next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return Verdict(DIFFERENT, f"byte {at} of {len(a)}, now of {len(b)}")
