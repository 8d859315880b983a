"""Whether the comparison of two recipes keeps its word: recipes that are equal, compared often.

Trainings are simulated from the variances that real ones showed, and handed to the comparison's own
functions as counts. Equal recipes should be called different in 1 - level of all comparisons.

Shape suffixes: S seeds, P prompts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eagle3.seed_statistics import Components, paired_differences, t_interval
from eagle3.statistics import Counts


def called_different(
    found: Components,
    steps_P: Tensor,
    tau: float,
    *,
    effect: float,
    seeds: int,
    simulations: int,
    level: float,
    generator: torch.Generator,
) -> float:
    """Share of simulated comparisons whose interval leaves out zero.

    Args:
        found: variances of one recipe's τ.
        steps_P: verification steps of the prompts; each simulation draws its prompts among them,
            with replacement.
        tau: of the first recipe.
        effect: by how much the second one's true τ is above; 0 for equal recipes.
        seeds: trainings of each recipe. Each has a variation of its own: that two recipes share
            a seed gives them the order of the data, not the same luck.
    """
    rejected = 0
    for _ in range(simulations):
        drawn = torch.randint(len(steps_P), (len(steps_P),), generator=generator)
        chosen_P = steps_P[drawn].double()
        prompt_P = _normal(found.prompt, (len(chosen_P),), generator)
        arms = [
            _counts(tau + shift, chosen_P, prompt_P, found, seeds, generator)
            for shift in (0.0, effect)
        ]
        interval = t_interval(paired_differences(*arms), level)
        rejected += not interval.low <= 0.0 <= interval.high
    return rejected / simulations


def _counts(
    tau: float,
    steps_P: Tensor,
    prompt_P: Tensor,
    found: Components,
    seeds: int,
    generator: torch.Generator,
) -> Counts:
    """Counts of some trainings of a recipe, whose τ vary as found."""
    seed_S1 = _normal(found.seed, (seeds, 1), generator)
    rest_SP = prompt_P + _normal(found.residual, (seeds, len(steps_P)), generator)
    accepted_SP = (tau - 1.0 + seed_S1) * steps_P + rest_SP * steps_P.mean()
    return Counts(accepted_SP, steps_P.expand(seeds, -1))


def _normal(variance: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * math.sqrt(variance)
