"""`eagle3`, the commands for people. Everything behind a command is imported when it is called.

DVC calls `python -m stages.x` instead: inside its temporary copies a console script would run the
code of the project it was installed from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eagle3.errors import HarnessError
from experiments.folder_commands import diagnose, export, import_states, parity, train
from experiments.project import project_root
from experiments.study.commands import promote, scaling, study_app

Overlay = Annotated[
    Path | None, typer.Option(help="YAML file with the keys of params.yaml that differ.")
]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]


class Stoppable(TyperGroup):
    """Ctrl-C and `kill` end every command with one line and the exit code that shells expect."""

    def invoke(self, ctx: Any) -> Any:
        from stages.signals import STOPPED, ignore_stop_signals, is_stop, stop_on_signals

        stop_on_signals()
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if not is_stop(error):
                raise
            ignore_stop_signals()
            typer.echo("stopped; the same command takes up what is finished", err=True)
            raise typer.Exit(STOPPED) from None


app = typer.Typer(
    cls=Stoppable,
    help="Trains EAGLE-3 drafters as a repeatable experiment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def repro(params: Overlay = None) -> None:
    """Run the pipeline, or with --params another setting of it."""
    from experiments.overlay import run_default, run_overlay

    root = project_root()
    raise typer.Exit(run_default(root) if params is None else run_overlay(root, params.resolve()))


@app.command()
def ui(
    port: Annotated[int | None, typer.Option(help="Default: 5000, or a free one.")] = None,
) -> None:
    """Open MLflow over the project's store, on 127.0.0.1."""
    from experiments.ui import serve

    raise typer.Exit(serve(project_root(), port))


@app.command()
def sync() -> None:
    """Send MLflow what a dead store or a killed run left behind. Dead runs are closed."""
    from experiments.sync_command import run

    run(project_root())


@app.command()
def lineage(
    what: Annotated[
        str,
        typer.Argument(
            help="A path (results in reports/, too), an MLflow run's id, a stage, or a key of "
            "metrics/summary.json."
        ),
    ],
    against: Annotated[
        str | None, typer.Option(help="Another of these: print what differs between the two.")
    ] = None,
    json: Json = False,
) -> None:
    """Say which data, code, settings and runs made a result."""
    from experiments.lineage_command import run

    run(project_root(), what, against, as_json=json)


@app.command()
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STAGE|PATH",
            help="Stages, or paths that they make; train: of every arm. Absent: all.",
        ),
    ] = None,
    json: Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder of the rerun.")] = False,
) -> None:
    """Run stages again in a clean clone and compare."""
    from experiments.verify_command import run

    raise typer.Exit(run(project_root(), what or [], as_json=json, keep=keep))


@app.command()
def plan(params: Overlay = None) -> None:
    """Say what a run would take: tokens, disk, memory, hours. No weight is loaded."""
    from experiments.plan_command import run

    run(project_root(), params)


# In the order of --help, which puts `study` and its commands last.
app.command()(train)
app.command()(parity)
app.command()(diagnose)
app.command()(export)
app.command("import")(import_states)
app.command()(scaling)
app.command()(promote)
app.add_typer(study_app, name="study")


def main() -> None:
    """Entry point: a known mistake is a message and exit code 2."""
    # DVC's command lines say `python`: this environment's, activated or not.
    own, places = str(Path(sys.executable).parent), os.environ.get("PATH", "").split(os.pathsep)
    if own not in places:
        os.environ["PATH"] = os.pathsep.join([own, *places])
    try:
        app()
    except HarnessError as error:
        print(f"eagle3: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        from stages.signals import trouble_with_disk

        if known := trouble_with_disk(error):
            print(f"eagle3: {known}", file=sys.stderr)
            raise SystemExit(2) from None
        raise


if __name__ == "__main__":
    main()
