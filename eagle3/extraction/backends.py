"""Which engine extracts, by the settings. What is behind a backend is imported when it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from eagle3.extraction.base import ExtractSettings, StatesEngine
from eagle3.verifier import VerifierSpec


@contextlib.contextmanager
def open_engine(
    settings: ExtractSettings,
    spec: VerifierSpec,
    aux_layers: Sequence[int],
    *,
    device: str,
    longest: int,
    work: Path,
) -> Iterator[StatesEngine]:
    """The engine that the settings name, for the length of a block.

    Args:
        aux_layers: post-layer indices, in range.
        longest: tokens of the longest document.
        work: folder for what a server leaves.

    Raises:
        HarnessError: the engine is not installed, or its server ends at start.
    """
    serving: Callable[..., AbstractContextManager[StatesEngine]] | None = None
    if settings.backend == "sglang":
        from eagle3.extraction.sglang import sglang_engine as serving
    elif settings.backend == "vllm":
        from eagle3.extraction.vllm import vllm_engine as serving
    if serving is not None:
        with serving(
            settings.server,
            spec,
            aux_layers,
            dtype=settings.dtype,
            device=device,
            batch_tokens=settings.batch_tokens,
            longest=longest,
            work=work,
        ) as engine:
            yield engine
        return
    from eagle3.extraction.transformers import TransformersEngine

    yield TransformersEngine.open(spec, aux_layers, getattr(torch, settings.dtype), device)


def batches_ahead(settings: ExtractSettings) -> int:
    """Batches to ask of the engine at once: as many as keep all of its servers busy."""
    if settings.backend == "transformers":
        return 1
    return settings.server.in_flight * max(1, len(settings.server.urls))
