"""What tests of every serving engine have in common: what is asked, and what the local one answers.

Knows no engine but by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from eagle3.cached_verifier import CachedVerifier
from eagle3.chain import ChainProposer
from eagle3.checkpoint import load_drafter, save_drafter
from eagle3.decode import Decoded, speculative_decode
from eagle3.engines.served import Answer
from eagle3.engines.server import ServerSettings
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.initialise import DrafterSettings, new_drafter
from eagle3.local_decoding import Prompt, exact_logits
from eagle3.served_decoding import decode_served, served_counts, served_speed, serving_engine
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head, write_head
from eagle3.verifier_model import load_model
from eagle3.vocab import DraftVocabulary

Engine = Literal["sglang", "vllm"]
PROMPTS = [[1, 40, 77, 200, 12, 9], [5, 6, 7], list(range(20, 60))]


def installed(engine: Engine, *, start_seconds: float = 600.0) -> ServerSettings:
    """The engine that `make engines` installs, to be started."""
    environment = Path(__file__).parent.parent / f".venv-{engine}"
    return ServerSettings(environment=str(environment), start_seconds=start_seconds)


def head_of(spec: VerifierSpec, folder: Path) -> VerifierHead:
    """A verifier's head, by way of a file in the folder."""
    write_head(spec, folder / "head.safetensors")
    return read_head(folder / "head.safetensors")


def decode_locally(
    spec: VerifierSpec, head: VerifierHead, drafter: Path, tokens: int
) -> list[Decoded]:
    """The local engine's answers to `PROMPTS`, in float32 with chains of 3."""
    loaded = load_drafter(drafter, head, torch.float32).eval().requires_grad_(False)
    verifier = CachedVerifier(load_model(spec, torch.float32, "cpu"), loaded.config.aux_layers)
    return [
        speculative_decode(
            verifier, ChainProposer(loaded), prompt, k=3, max_tokens=tokens,
            eos_ids=head.config.eos_token_ids,
        )
        for prompt in PROMPTS
    ]  # fmt: skip


def serve_a_random_drafter(
    engine: Engine,
    version: str,
    spec: VerifierSpec,
    aux_layers: tuple[int, ...],
    folder: Path,
) -> list[tuple[Answer, Decoded]]:
    """Serves it through what evaluation calls (plain server, speculative server, local engine), and
    asserts that it changes no text and is hardly ever right. Returns both engines' answers."""
    head = head_of(spec, folder)
    shape = DrafterSettings(layer_init="random", fc_init="random", head="random")
    half = DraftVocabulary.from_targets(torch.arange(1, spec.vocab_size, 2), spec.vocab_size)
    drafter = new_drafter(head, half, aux_layers, shape, seed=0)
    save_drafter(folder / "drafter", drafter, head.config, torch.float32)
    subject = Subject(spec, head, folder / "drafter", "cpu")
    evaluation = EvaluateSettings(
        engine=engine, engine_dtype="float32", decode_tokens=40, server=installed(engine)
    )
    prompts = [Prompt(f"p{number}", ids) for number, ids in enumerate(PROMPTS)]
    serving = serving_engine(subject, prompts, evaluation, folder / "logs")
    assert serving is not None
    served = decode_served(serving, subject, prompts, evaluation)
    assert all(answer.verify_steps == answer.drafted == 0 for answer in served.plain)
    local = decode_locally(spec, head, folder / "drafter", 40)
    counts = served_counts(served, prompts, local, 3, exact_logits(subject))
    assert (counts["engine"], counts["version"]) == (engine, version)
    assert (counts["equal_to_plain"], counts["equal_to_local"]) == (3, 3)
    assert counts["accepted"] / counts["verify_steps"] < 0.1
    assert 0.25 <= counts["old_sglang_rate"] < 0.28
    assert served_speed(served)["speedup"] > 0
    return list(zip(served.speculative, local, strict=True))
