"""The order of the report's sections: each a function of the data, None where its input is missing.

The first screen is in `eagle3.report.result`. What a section says is computed from its inputs; only
what the numbers mean is written in its module.
"""

from __future__ import annotations

from eagle3.report.acceptance import acceptance
from eagle3.report.arms import arms
from eagle3.report.codecs import codecs
from eagle3.report.contract import contract
from eagle3.report.crossover import crossover
from eagle3.report.data_used import data_used
from eagle3.report.engines import engines
from eagle3.report.exactness import exactness
from eagle3.report.limits import limits
from eagle3.report.lineage import lineage
from eagle3.report.mistakes import mistakes
from eagle3.report.origin import costs, origin
from eagle3.report.scaling import scaling
from eagle3.report.search import search
from eagle3.report.seeds import over_seeds
from eagle3.report.served import served
from eagle3.report.speed import speed
from eagle3.report.texts import texts
from eagle3.report.trainers import trainers
from eagle3.report.training import training
from eagle3.report.vocabulary import coverage

SECTIONS = (
    speed,
    data_used,
    arms,
    training,
    acceptance,
    texts,
    exactness,
    coverage,
    search,
    over_seeds,
    crossover,
    scaling,
    contract,
    mistakes,
    served,
    engines,
    trainers,
    codecs,
    costs,
    lineage,
    origin,
    limits,
)
