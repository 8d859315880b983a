"""Self-written prompts, a file or a data set, and benchmarks -> train, dev and test prompts."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from pathlib import Path

from eagle3.errors import HarnessError
from eagle3.prompt_sources import PromptSettings
from eagle3.prompts import (
    Prompt,
    dev_and_train,
    distinct,
    read_dataset,
    read_prompts,
    write_prompts,
)
from eagle3.verifier import VerifierSpec
from eagle3.workspace import publish
from stages.runner import Stage, run_stage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", required=True, help="Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of <split>.jsonl")


def main(stage: Stage, args: argparse.Namespace) -> None:
    settings = stage.section(PromptSettings, "prompts")
    cache = stage.root / ".work" / "packages"
    test = distinct(prompt for source in settings.test for prompt in source.read(cache))
    held_out = frozenset(prompt.id for prompt in test)
    key = {
        "settings": settings.model_dump(),
        "held_out": sorted(held_out),
        "run": stage.run.model_dump(),
    }
    if settings.source is None:
        spec = VerifierSpec.open(args.verifier, trust_remote_code=stage.run.trust_remote_code)
        key["verifier"] = [spec.verifier, spec.revision]
    with stage.work(key) as work:
        prompts = (
            _given(settings, held_out)
            if settings.source is not None
            else _written(stage, settings, spec, held_out, work)
        )
        dev, train = dev_and_train(prompts, settings.dev_share)
        if not train or not dev:
            raise HarnessError(
                "too few prompts for a training and a dev split",
                where="prompts.count",
                rule="at least one each",
                got=f"{len(train)} for training, {len(dev)} for dev",
                fix="raise prompts.count or prompts.dev_share",
            )
        folder = work / "prompts"
        for split, chosen in (("train", train), ("dev", dev), ("test", test)):
            write_prompts(folder / f"{split}.jsonl", chosen, split)
            stage.note(split, dict(Counter(prompt.source for prompt in chosen)))
        publish(folder, args.out)


def _written(
    stage: Stage,
    settings: PromptSettings,
    spec: VerifierSpec,
    held_out: frozenset[str],
    work: Path,
) -> list[Prompt]:
    """Distinct prompts by the verifier itself."""
    import torch

    from eagle3.generation_workers import Generation
    from eagle3.self_written import write_prompts as write
    from eagle3.verifier_model import load_tokenizer

    assert settings.writing is not None and settings.count is not None
    workers = settings.writing.workers
    with Generation(spec, torch.bfloat16, stage.run.device, workers=workers) as generate:
        return write(
            generate,
            load_tokenizer(spec),
            spec,
            settings.writing,
            count=settings.count,
            seed=stage.run.seed,
            work=work,
            without=held_out,
        )


def _given(settings: PromptSettings, held_out: frozenset[str]) -> list[Prompt]:
    """Distinct prompts of a file or a data set."""
    assert settings.source is not None
    path = Path(settings.source)
    if path.suffix in (".jsonl", ".gz") or path.exists():
        found = iter(read_prompts(path))
    else:
        found = read_dataset(settings.source, settings.dataset_split)
    # A conversation counts by its question: held-out ones come with answers of others.
    kept = (prompt for prompt in found if prompt.question().id not in held_out)
    return distinct(islice(kept, settings.count), without=held_out)


if __name__ == "__main__":
    run_stage("prompts", main, add_arguments)
