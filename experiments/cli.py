"""`eagle3`, the commands for people. Everything behind a command is imported when it is called.

DVC calls `python -m stages.x` instead: inside its temporary copies a console script would run the
code of the project it was installed from.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eagle3.errors import HarnessError
from experiments.study.commands import promote, scaling, study_app

app = typer.Typer(
    help="Trains EAGLE-3 drafters as a repeatable experiment.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(study_app, name="study")
app.command()(promote)
app.command()(scaling)


# What hidden states of other programs do not say of themselves.
AuxLayers = Annotated[
    str | None,
    typer.Option(help="Outputs of decoder layers that the aux states are, as 2,30,58."),
]
FinalHidden = Annotated[
    str | None,
    typer.Option(help="Final states: pre_norm or post_norm. Absent: found from the data."),
]
MaskAlignment = Annotated[
    str | None,
    typer.Option(help="Loss mask: token or prediction. Absent: found from the data."),
]
PaddingRows = Annotated[
    str,
    typer.Option(help="Rows without states at a sample's ends: refuse the sample, or drop them."),
]


def project_root() -> Path:
    """The folder above, or this one, that holds dvc.yaml.

    Raises:
        HarnessError: there is none.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file():
            return folder
    raise HarnessError("not inside the project", where=here, rule="a folder with dvc.yaml")


@app.command()
def repro(
    params: Annotated[
        Path | None,
        typer.Option(help="YAML file with the keys of params.yaml that differ."),
    ] = None,
) -> None:
    """Run the pipeline; with --params another setting of it, in a place of its own."""
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
    """Send metrics to MLflow that a dead store or a killed run left behind; close dead runs."""
    from experiments.sync_command import run

    run(project_root())


@app.command()
def lineage(
    what: Annotated[
        str,
        typer.Argument(
            help="A path, an MLflow run's id, a stage, or a key of metrics/summary.json."
        ),
    ],
    against: Annotated[
        str | None, typer.Option(help="Another of these: print what differs between the two.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say which prompts, verifier, code, settings and runs stand behind a result."""
    from experiments.lineage_command import run

    run(project_root(), what, against, as_json=json)


@app.command()
def verify(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Stages, or paths that they make; train: of every arm. Absent: all."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folder of the rerun.")] = False,
) -> None:
    """Run stages again from a clean clone and compare every output with what dvc.lock says."""
    from experiments.verify_command import run

    raise typer.Exit(run(project_root(), what or [], as_json=json, keep=keep))


@app.command()
def train(
    verifier_path: Annotated[
        str, typer.Option(help="The verifier: a Hugging Face folder or hub id.")
    ],
    data_dir: Annotated[
        Path,
        typer.Option(
            help="Hidden states: a data set folder, one with train/ and dev/, or a folder of "
            "speculators or SpecForge, read in place."
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="Where the drafter's checkpoint goes.")],
    vocab_mapping_dir: Annotated[
        Path | None,
        typer.Option(
            help="Draft vocabulary: a folder with d2t.npy and t2d.npy, or a .safetensors."
        ),
    ] = None,
    finetune_from: Annotated[
        str | None,
        typer.Option(
            help="Drafter to start from: a folder or hub id, in EAGLE's, SGLang's or speculators' "
            "layout. Absent: from scratch."
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", min=0)] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Longest document, in tokens; longer ones are cut.", min=2)
    ] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Training-time-test steps.", min=1)] = None,
    noise_std: Annotated[
        float | None,
        typer.Option(help="Uniform noise of plus or minus this on the aux states.", min=0),
    ] = None,
    val_ratio: Annotated[
        float | None,
        typer.Option(help="Share of documents held out, where there is no dev/.", min=0, max=0.9),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Learning rate schedule: cosine, linear or constant.")
    ] = None,
    warmup_ratio: Annotated[
        float | None, typer.Option(help="Share of the steps that warm up.", min=0, max=1)
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option(help="Processes that read data ahead; 0: none.", min=0)
    ] = None,
    aux_layers: AuxLayers = None,
    final_hidden: FinalHidden = None,
    mask_alignment: MaskAlignment = None,
    padding_rows: PaddingRows = "refuse",
    drafter_aux_layers: Annotated[
        str | None,
        typer.Option(
            help="Outputs of decoder layers that the drafter to start from was trained on, as "
            "2,30,58, if its config is silent or wrong."
        ),
    ] = None,
) -> None:
    """Train one drafter outside the pipeline. What is not said comes from params.yaml."""
    from experiments.conventions_flags import conventions, layers
    from experiments.train_command import run

    run(
        verifier_path=verifier_path,
        data_dir=data_dir,
        vocab_mapping_dir=vocab_mapping_dir,
        output_dir=output_dir,
        finetune_from=finetune_from,
        epochs=epochs,
        lr=lr,
        max_seq_len=max_seq_len,
        ttt_steps=ttt_steps,
        noise_std=noise_std,
        val_ratio=val_ratio,
        scheduler=scheduler,
        warmup_ratio=warmup_ratio,
        num_workers=num_workers,
        conventions=conventions(aux_layers, final_hidden, mask_alignment, padding_rows),
        drafter_aux_layers=layers(drafter_aux_layers, "--drafter-aux-layers"),
    )


@app.command()
def parity(
    data_dir: Annotated[
        Path, typer.Option(help="Hidden states: a data set folder, or one with train/ and dev/.")
    ],
    verifier_path: Annotated[
        str, typer.Option(help="The verifier: a Hugging Face folder or hub id, or a head file.")
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="What will serve and computes the states again: sglang, vllm or transformers. "
            "Absent: data and head alone."
        ),
    ] = None,
    documents: Annotated[int, typer.Option(help="Samples of each split.", min=1)] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a sample.", min=8)] = 256,
    dtype: Annotated[
        str, typer.Option(help="In which the engine computes: bfloat16, float32.")
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the engine computes.")] = "cpu",
) -> None:
    """Check by value that stored hidden states are what serving will see; name what differs."""
    from experiments.parity_command import run

    run(
        data_dir=data_dir,
        verifier_path=verifier_path,
        engine=engine,
        documents=documents,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
    )


@app.command("import")
def import_states(
    verifier_path: Annotated[
        str, typer.Option(help="The verifier: a Hugging Face folder or hub id.")
    ],
    data_dir: Annotated[Path, typer.Option(help="A folder of speculators or SpecForge.")],
    output_dir: Annotated[
        Path, typer.Option(help="Where train/ (and dev/) go, as the pipeline reads them.")
    ],
    val_ratio: Annotated[
        float, typer.Option(help="Share of documents that go to dev/.", min=0, max=0.9)
    ] = 0.0,
    aux_layers: AuxLayers = None,
    final_hidden: FinalHidden = None,
    mask_alignment: MaskAlignment = None,
    padding_rows: PaddingRows = "refuse",
) -> None:
    """Write another program's hidden states as the pipeline's own shards."""
    from experiments.conventions_flags import conventions
    from experiments.import_command import run

    run(
        verifier_path=verifier_path,
        data_dir=data_dir,
        output_dir=output_dir,
        val_ratio=val_ratio,
        conventions=conventions(aux_layers, final_hidden, mask_alignment, padding_rows),
    )


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A drafter, in either layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    verifier_path: Annotated[
        str, typer.Option(help="Its verifier: a Hugging Face folder or hub id, or a head file.")
    ],
    format: Annotated[
        str, typer.Option(help="eagle: SGLang and vLLM read it; speculators: vLLM reads it.")
    ] = "eagle",
) -> None:
    """Write a drafter in the layout that an engine reads, and prove that it is the same drafter."""
    from experiments.export_command import run

    run(checkpoint=checkpoint, out=out, verifier_path=verifier_path, layout=format)


@app.command()
def plan(
    params: Annotated[
        Path | None,
        typer.Option(help="YAML file with the keys of params.yaml that differ."),
    ] = None,
) -> None:
    """Say what a run would take (tokens, disk, memory, hours) without loading a weight."""
    from experiments.plan_command import run

    run(project_root(), params)


@app.command()
def diagnose(
    drafter: Annotated[str, typer.Argument(help="The drafter: a folder or hub id.")],
    data_dir: Annotated[
        Path,
        typer.Option(help="Hidden states of its verifier: a data set folder, or one with test/."),
    ],
    verifier_path: Annotated[
        str, typer.Option(help="The verifier: a Hugging Face folder or hub id.")
    ],
    documents: Annotated[int, typer.Option(help="Documents to replay.", min=1)] = 12,
    k: Annotated[int, typer.Option(help="Drafts a verification step.", min=1, max=16)] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16, or float32.")] = "bfloat16",
) -> None:
    """Name the convention under which a drafter was trained, by how well it drafts under each."""
    from experiments.diagnose_command import run

    run(
        drafter=drafter,
        data_dir=data_dir,
        verifier_path=verifier_path,
        documents=documents,
        k=k,
        dtype=dtype,
    )


def main() -> None:
    """Entry point: a known mistake is a message and exit code 2."""
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
