"""The space of a study's axes: checked against the settings it varies, and drawn from in a trial.

An axis that depends on another one's value is a parameter of its own in the store for each value,
`noise.std (gaussian_relative)`: its ranges are in different units and must not be learnt together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eagle3.arm import arm_settings
from eagle3.errors import HarnessError
from eagle3.settings import Settings
from eagle3.train_settings import TrainSettings
from experiments.study.settings import Axis, Value

if TYPE_CHECKING:
    import optuna

Space = Mapping[str, Axis]


def check_space(space: Space, shared: Mapping[str, Any], *, where: str) -> None:
    """Refuses axes that training could not use or that leave out the present settings.

    Args:
        shared: the arm's present settings, nested.

    Raises:
        HarnessError: an unknown name, an axis that depends on what is not an axis, a value that
            training refuses, or a present value outside its range.
    """
    known = set(_leaves(TrainSettings))
    if unknown := [name for name in space if name not in known]:
        raise HarnessError(
            "a study varies a parameter that training does not have",
            where=where,
            rule=f"keys of train: {', '.join(sorted(known))}",
            got=", ".join(unknown),
            fix="correct the name, or take the axis out",
        )
    for name, axis in space.items():
        for branch, plain in _branches(axis):
            given = {} if branch is None else _given(name, axis, branch, space, where)
            ends = plain.choices if plain.choices is not None else [plain.low, plain.high]
            for value in ends:
                arm_settings(shared, nested({**given, name: value}), where=f"{where}, {name}")
    default_point(space, shared, where=where)


def default_point(space: Space, shared: Mapping[str, Any], *, where: str) -> dict[str, Value]:
    """The present settings as a trial's parameters.

    Raises:
        HarnessError: a value lies outside its axis.
    """
    values = arm_settings(shared, {}, where=where).model_dump()
    point: dict[str, Value] = {}
    for name, axis in space.items():
        branch = None if axis.given is None else str(_at(values, axis.given))
        plain = dict(_branches(axis)).get(branch)
        if plain is None:
            continue
        value = _at(values, name)
        if plain.choices is not None:
            inside = value in plain.choices
        else:
            assert plain.low is not None and plain.high is not None
            inside = plain.low <= value <= plain.high
        if not inside:
            raise HarnessError(
                "an axis leaves out the present setting, which is tried first",
                where=f"{where}, {name}",
                rule=plain.choices or f"{plain.low} to {plain.high}",
                got=value,
                fix="widen the axis, or change the setting",
            )
        point[parameter(name, branch)] = value
    return point


def suggest(space: Space, trial: optuna.Trial) -> dict[str, Value]:
    """One point, by dotted names; axes that depend on others after those."""
    values: dict[str, Value] = {}
    for name, axis in sorted(space.items(), key=lambda item: item[1].given is not None):
        if axis.given is None:
            values[name] = _draw(parameter(name, None), axis, trial)
            continue
        branch = str(values[axis.given])
        assert axis.ranges is not None
        if branch in axis.ranges:
            values[name] = _draw(parameter(name, branch), axis.ranges[branch], trial)
    return values


def parameter(name: str, branch: str | None) -> str:
    """The name in the store."""
    return name if branch is None else f"{name} ({branch})"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as mappings inside each other."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        place = made
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return made


def _draw(name: str, axis: Axis, trial: optuna.Trial) -> Value:
    if axis.choices is not None:
        return trial.suggest_categorical(name, axis.choices)
    assert axis.low is not None and axis.high is not None
    if isinstance(axis.low, int) and isinstance(axis.high, int):
        return trial.suggest_int(name, axis.low, axis.high, log=axis.log)
    return trial.suggest_float(name, axis.low, axis.high, log=axis.log)


def _branches(axis: Axis) -> Iterator[tuple[str | None, Axis]]:
    if axis.ranges is None:
        yield None, axis
    else:
        yield from axis.ranges.items()


def _given(name: str, axis: Axis, branch: str, space: Space, where: str) -> dict[str, Value]:
    other = space.get(axis.given or "")
    if other is None or other.choices is None or branch not in map(str, other.choices):
        raise HarnessError(
            "an axis depends on a value that is never tried",
            where=f"{where}, {name}",
            rule="given names an axis with choices, and ranges are named by these choices",
            got=f"{axis.given} = {branch}",
            fix="correct given, or add the value to the other axis's choices",
        )
    value = next(choice for choice in other.choices if str(choice) == branch)
    return {str(axis.given): value}


def _leaves(model: type[Settings], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Settings):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _at(values: Mapping[str, Any], name: str) -> Any:
    place: Any = values
    for part in name.split("."):
        place = place[part]
    return place
