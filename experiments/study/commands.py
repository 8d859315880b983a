"""`eagle3 study …`, `scaling` and `promote`; what is behind them is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.project import project_root

study_app = typer.Typer(
    help="Search each arm's settings and compare what is found.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
)
Name = Annotated[str | None, typer.Option(help="Of the study. Default: study.name.")]
Storage = Annotated[
    str | None,
    typer.Option(
        help="postgresql://USER:PASSWORD@HOST/DATABASE or sqlite:///FILE. Default: studies.db."
    ),
]
Workers = Annotated[int, typer.Option(help="Processes on this machine.", min=1)]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Drafter checkpoint that arms with a checkpoint start from.")
]


@study_app.callback()
def study(
    context: typer.Context,
    name: Name = None,
    storage: Storage = None,
    finetune_from: Checkpoint = None,
    workers: Workers = 1,
    compare: Annotated[bool, typer.Option(help="Compare the winners after the search.")] = True,
) -> None:
    """Search each arm's settings, compare the winners over seeds; writes reports/study.json.

    Stopped or killed, the same command goes on. On several machines: the same command with the
    same --storage on each.
    """
    if context.invoked_subcommand is not None:
        return
    from experiments.study.run import run_study

    run_study(
        project_root(),
        name=name,
        storage=storage,
        finetune_from=finetune_from,
        workers=workers,
        with_comparison=compare,
    )


@study_app.command(hidden=True)
def work(
    name: Name = None,
    storage: Storage = None,
    finetune_from: Checkpoint = None,
    queue: str | None = None,
    seconds: float | None = None,
) -> None:
    """One worker of a study that another process has begun."""
    from experiments.study.run import run_worker

    run_worker(
        project_root(),
        name=name,
        storage=storage,
        finetune_from=finetune_from,
        queue=queue,
        seconds=seconds,
    )


@study_app.command()
def aa(storage: Storage = None, workers: Workers = 1) -> None:
    """Calibrate the comparison on equal recipes. Writes reports/aa_test.json."""
    from experiments.study.calibration import run_aa

    run_aa(project_root(), storage=storage, workers=workers)


@study_app.command()
def crossover(storage: Storage = None, workers: Workers = 1) -> None:
    """Map τ against training tokens, by sibling. Writes reports/crossover.json."""
    from experiments.study.crossover import run_crossover

    run_crossover(project_root(), storage=storage, workers=workers)


def scaling(
    storage: Storage = None,
    workers: Workers = 1,
    target: Annotated[
        float | None, typer.Option(help="τ to reach. Default: scaling.target.")
    ] = None,
) -> None:
    """Say what more data would bring. Trains on parts of it; writes reports/scaling.json."""
    from experiments.study.scaling import run_scaling

    run_scaling(project_root(), storage=storage, workers=workers, target=target)


def promote(
    name: Name = None,
    storage: Storage = None,
    arm: Annotated[
        list[str] | None, typer.Option(metavar="ARM", help="Only this arm; may be repeated.")
    ] = None,
    keep_budget: Annotated[
        bool, typer.Option(help="Leave the arm's tokens as they are; the trial is not repeated.")
    ] = False,
) -> None:
    """Write a study's winners into params.yaml."""
    from experiments.study.promote import promote as write

    write(project_root(), name=name, storage=storage, arms=arm, keep_budget=keep_budget)
