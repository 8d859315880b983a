"""The `study` and `scaling` sections of params.yaml.

Knows nothing of what a parameter's name means: see `experiments.study.space`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from eagle3.settings import Settings

Value = bool | int | float | str | None


class Axis(Settings):
    """What one setting may be: a range, a choice, or a range for each value of another setting.

    low, high: ends of a range, both allowed; whole numbers at both ends make whole numbers.
    log: drawn evenly in the logarithm.
    choices: the values themselves.
    given, ranges: the other setting, and this one's axis at each of its values. At values not
        named, the setting stays as it is.
    """

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    choices: list[Value] | None = None
    given: str | None = None
    ranges: dict[str, Axis] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Axis:
        forms = [
            self.low is not None or self.high is not None,
            self.choices is not None,
            self.given is not None or self.ranges is not None,
        ]
        if sum(forms) != 1:
            raise ValueError("give low and high, or choices, or given and ranges")
        if forms[0] and (self.low is None or self.high is None):
            raise ValueError("a range has both low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("the range is empty: low is above high")
        if self.log and (self.low is None or self.low <= 0):
            raise ValueError("a logarithmic range starts above 0")
        if self.choices is not None and not self.choices:
            raise ValueError("the range is empty: no choices")
        if forms[2] and (self.given is None or not self.ranges):
            raise ValueError("given and ranges belong together")
        return self


class StudyArm(Settings):
    """space: axes of this arm that differ from the shared ones."""

    space: dict[str, Axis] = Field(default_factory=dict)


class SeedSettings(Settings):
    """The comparison of the winners.

    seeds: trainings of each arm; none of them is the seed that the search used.
    larger_seeds: trainings of the from-scratch arm at the budget that checkpoint and finetuning
        had together; 0 leaves it out.
    checkpoint_tokens: training tokens of the checkpoint that is finetuned, where no arm of
        params.yaml made it.
    effect, power: the difference in τ that is worth seeing, and how surely.
    """

    seeds: int = Field(5, ge=2)
    larger_seeds: int = Field(2, ge=0)
    checkpoint_tokens: int | None = Field(None, ge=1)
    effect: float = Field(0.05, gt=0.0)
    power: float = Field(0.8, gt=0.0, lt=1.0)


class AaSettings(Settings):
    """The calibration: short trainings of one arm, and comparisons simulated from them.

    cost: of a training, as in `StudySettings`.
    """

    arm: str = "scratch"
    seeds: int = Field(8, ge=8)
    cost: int = Field(gt=0)
    simulations: int = Field(2000, ge=1000)


class CrossoverSettings(Settings):
    """τ against training tokens, from scratch and finetuned from ever more distant siblings.

    scratch, finetune, base: arms of params.yaml; `base` makes the checkpoint to finetune.
    bits: siblings, by `sibling.bits`; the one of params.yaml need not be made again.
    tokens: budgets in packed rows, each a training of its own.
    seeds: of each.
    """

    scratch: str = "scratch"
    finetune: str = "finetune"
    base: str = "base"
    bits: list[int] = Field(min_length=1)
    tokens: list[int] = Field(min_length=2)
    seeds: int = Field(3, ge=2)

    @model_validator(mode="after")
    def _ascending(self) -> CrossoverSettings:
        if sorted(set(self.tokens)) != self.tokens or self.tokens[0] <= 0:
            raise ValueError("tokens are positive and ascend")
        if len(set(self.bits)) != len(self.bits):
            raise ValueError("bits: each sibling once")
        return self


class ScalingSettings(Settings):
    """Trainings of one recipe on nested parts of the data, each to its best dev τ.

    parts: one part in so many, from small to all.
    passes: over all the data. A smaller part bears more passes before dev τ falls: one part in n is
        passed over n^growth times as often.
    evaluations: replays on dev during each training; the best one's weights are scored.
    seeds: of each part; each draws parts of its own.
    target: τ whose data is asked for.
    """

    arm: str = "scratch"
    parts: list[int] = Field(default=[16, 8, 4, 2, 1], min_length=4)
    passes: float = Field(gt=0.0)
    growth: float = Field(0.5, ge=0.0, le=1.0)
    evaluations: int = Field(6, ge=1)
    seeds: int = Field(3, ge=2)
    target: float = Field(gt=1.0)

    @model_validator(mode="after")
    def _to_all(self) -> ScalingSettings:
        if sorted(set(self.parts), reverse=True) != self.parts or self.parts[-1] != 1:
            raise ValueError("parts get larger up to all the data: 16, 8, 4, 2, 1")
        if sum(part >= 2 for part in self.parts) < 3:
            raise ValueError("three parts or more are at most one half: they foretell the whole")
        return self


class Promoted(Settings):
    """What `eagle3 promote` wrote into the arms: from which study, which trial, its dev τ."""

    study: str
    digest: str
    trials: dict[str, int]
    dev_tau: dict[str, float]


class StudySettings(Settings):
    """A search over the settings of some arms, and the comparison of what it finds.

    name: of the study in its store; other data, code or settings need another name.
    seed: of the sampler, the same for each arm. Trainings use `run.seed`.
    trials: of each arm, its present settings first.
    startup: trials before the sampler learns from them, the first included; none is given up.
    cost: budget of a trial in supervised rows times TTT steps, so that more steps are not free.
    rungs: shares of the budget after which a trial may be given up.
    halving: of the trials that came to a rung, the best 1/halving go on.
    rung_documents: dev documents replayed at a rung; the end of a trial replays all.
    seconds: an outer limit of the search in wall time; null: none. Where it bites, the study says
        so: the trials that it took are no longer a matter of settings and seed alone.
    threads: of each training whose settings are given (comparison, calibration, crossover map, law
        of scaling); as many run side by side as `run.threads` has room for. The search itself has
        `run.threads`, as the train stage has, so that its winners can be repeated there to the
        last digit.
    heartbeat: seconds after which a worker says that it lives; silent for four times as long, its
        trial goes to another.
    train: keys of the `train` section that all trials use, over those of the arm.
    space: axes by name of the `train` section's keys, dotted for those inside others.
    arms: those that are searched, by their names in `arms`, the compared two in this order.
    """

    name: str = Field("default", pattern=r"^[\w-]+$")
    seed: int = Field(0, ge=0)
    trials: int = Field(8, ge=1)
    startup: int = Field(4, ge=1)
    cost: int = Field(gt=0)
    rungs: list[float] = Field(default=[0.25, 0.5])
    halving: int = Field(2, ge=2)
    rung_documents: int = Field(16, ge=1)
    seconds: float | None = Field(None, gt=0.0)
    threads: int = Field(1, ge=1)
    heartbeat: int = Field(15, ge=1)
    train: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Axis] = Field(default_factory=dict)
    arms: dict[str, StudyArm] = Field(min_length=1)
    compare: SeedSettings = SeedSettings()
    aa: AaSettings | None = None
    crossover: CrossoverSettings | None = None
    promoted: Promoted | None = None

    @model_validator(mode="after")
    def _rungs(self) -> StudySettings:
        if any(not 0.0 < share < 1.0 for share in self.rungs) or sorted(set(self.rungs)) != (
            self.rungs
        ):
            raise ValueError("rungs are shares between 0 and 1 and ascend")
        return self

    def axes(self, arm: str) -> dict[str, Axis]:
        """The space of one arm."""
        return {**self.space, **self.arms[arm].space}
