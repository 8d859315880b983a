"""Commands on any verifier, folder of hidden states and drafter, the pipeline's or not.

What is behind them is imported when they are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Verifier = Annotated[str, typer.Option(help="The verifier: a Hugging Face folder or hub id.")]
VerifierOrHead = Annotated[
    str, typer.Option(help="The verifier: a Hugging Face folder or hub id, or a head file.")
]
States = Annotated[
    Path,
    typer.Option(
        help="Hidden states: a data set folder, one with train/ and dev/, or a folder of "
        "speculators or SpecForge, read in place."
    ),
]
# What hidden states of other programs do not say of themselves.
AuxLayers = Annotated[
    str | None,
    typer.Option(help="Outputs of decoder layers that the aux states are, as 2,30,58."),
]
FinalHidden = Annotated[
    str | None,
    typer.Option(
        help="Final states: pre_norm or post_norm. Absent: told by the length of their rows, which "
        "is the last norm's after it; the log shows the next-token loss of both readings."
    ),
]
MaskAlignment = Annotated[
    str | None,
    typer.Option(
        help="Loss mask: token or prediction. Absent: told by where the template opens answers."
    ),
]
PaddingRows = Annotated[
    str,
    typer.Option(help="Rows without states at a sample's ends: refuse the sample, or drop them."),
]


def train(
    verifier_path: Verifier,
    data_dir: States,
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
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Budget in packed rows, as an arm's tokens in params.yaml; in place of --epochs.",
            min=1,
        ),
    ] = None,
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
        tokens=tokens,
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


def parity(
    data_dir: States,
    verifier_path: VerifierOrHead,
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
    aux_layers: AuxLayers = None,
    final_hidden: FinalHidden = None,
    mask_alignment: MaskAlignment = None,
    padding_rows: PaddingRows = "refuse",
) -> None:
    """Check that stored hidden states are what serving will see. By value; names what differs."""
    from experiments.conventions_flags import conventions
    from experiments.parity_command import run

    run(
        data_dir=data_dir,
        verifier_path=verifier_path,
        engine=engine,
        documents=documents,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
        conventions=conventions(aux_layers, final_hidden, mask_alignment, padding_rows),
    )


def import_states(
    verifier_path: Verifier,
    data_dir: Annotated[
        Path,
        typer.Option(
            help="A folder of speculators or SpecForge; with --codec fp8 the pipeline's own too."
        ),
    ],
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
    codec: Annotated[
        str, typer.Option(help="none, or fp8: 8 bits a number and a scale for every row and layer.")
    ] = "none",
) -> None:
    """Write another program's hidden states as our own shards."""
    from experiments.conventions_flags import conventions
    from experiments.import_command import run

    run(
        verifier_path=verifier_path,
        data_dir=data_dir,
        output_dir=output_dir,
        val_ratio=val_ratio,
        conventions=conventions(aux_layers, final_hidden, mask_alignment, padding_rows),
        codec=codec,
    )


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
    """Write a drafter in the layout that an engine reads. Proves that it is the same drafter."""
    from experiments.export_command import run

    run(checkpoint=checkpoint, out=out, verifier_path=verifier_path, layout=format)


def diagnose(
    drafter: Annotated[str, typer.Argument(help="The drafter: a folder or hub id.")],
    data_dir: Annotated[
        Path,
        typer.Option(help="Hidden states of its verifier: a data set folder, or one with test/."),
    ],
    verifier_path: Verifier,
    documents: Annotated[int, typer.Option(help="Documents to replay.", min=1)] = 12,
    k: Annotated[int, typer.Option(help="Drafts a verification step.", min=1, max=16)] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16, or float32.")] = "bfloat16",
) -> None:
    """Name the convention of an unknown drafter. The one under which it drafts best."""
    from experiments.diagnose_command import run

    run(
        drafter=drafter,
        data_dir=data_dir,
        verifier_path=verifier_path,
        documents=documents,
        k=k,
        dtype=dtype,
    )
