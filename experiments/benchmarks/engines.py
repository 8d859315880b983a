"""The engines side by side: the states they see, what a drafter accepts in them, what parity names.

`python -m experiments.benchmarks.engines --out reports/engines.json` after `make repro` and
`make engines`; a few minutes. Every engine computes in float32. States are compared with
transformers' own `hidden_states`, served texts with plain ones of the same server. Then faults are
put into stored states on purpose, and the parity check says what it finds.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.dataset import Document, StatesDataset
from eagle3.evaluate import EvaluateSettings, Subject
from eagle3.extraction.backends import open_engine
from eagle3.extraction.base import EngineIdentity, ExtractSettings, States
from eagle3.extraction.transformers import TransformersEngine
from eagle3.local_decoding import Prompt, exact_decoding, exact_logits, spread_prompts
from eagle3.parity import Declared
from eagle3.parity_faults import diagnose
from eagle3.reference import first_rows, head_norm, measured, reference_layers, spread
from eagle3.served_decoding import decode_served, served_counts, serving_engine
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import VerifierHead, read_head
from eagle3.verifier_model import load_model
from eagle3.workspace import write_json
from experiments.evidence import KEY, of_benchmark

BACKENDS: dict[str, Literal["transformers", "sglang", "vllm"]] = {
    "local": "transformers",
    "sglang": "sglang",
    "vllm": "vllm",
}


def max_relative_error(
    engine: str, spec: VerifierSpec, head: VerifierHead, layers: Sequence[int], tokens: list[Tensor]
) -> float:
    """Largest over layers and documents of |states - transformers' hidden_states| / |states|."""
    settings = ExtractSettings(backend=BACKENDS[engine], dtype="float32")
    longest = max(map(len, tokens))
    with (
        tempfile.TemporaryDirectory() as work,
        open_engine(
            settings, spec, layers, device="cpu", longest=longest, work=Path(work)
        ) as opened,
    ):
        found = opened.extract(tokens)
        pre_norm = opened.identity.final_hidden == "pre_norm"
    model, norm = load_model(spec, torch.float32, "cpu"), head_norm(head)
    worst = 0.0
    for ids, states in zip(tokens, found, strict=True):
        with torch.inference_mode():
            hidden = model(ids.long()[None], output_hidden_states=True).hidden_states
        pairs = [(states.aux_TnH[:, i], hidden[k + 1][0]) for i, k in enumerate(layers)]
        pairs.append((norm(states.final_TH) if pre_norm else states.final_TH, hidden[-1][0]))
        for mine, theirs in pairs:
            worst = max(worst, float((mine.float() - theirs).norm() / theirs.norm()))
    return worst


def row(engine: str, subject: Subject, prompts: list[Prompt], tokens: int) -> dict[str, Any]:
    """Counts of one engine."""
    local = EvaluateSettings(decode_prompts=len(prompts), decode_tokens=tokens)
    exact = exact_decoding(subject, prompts, local)
    if engine == "local":
        counts = exact.summary()
        equal = counts["exactness"]["equal"]
        return {
            "tau": counts["tau"],
            "accepted_per_position": counts["accepted_per_position"],
            "verify_steps": counts["verify_steps"],
            "tokens_equal": equal == len(prompts),
            "prompts": len(prompts),
        }
    settings = local.model_copy(update={"engine": engine, "engine_dtype": "float32"})
    with tempfile.TemporaryDirectory() as logs:
        serving = serving_engine(subject, prompts, settings, Path(logs))
        assert serving is not None
        served = decode_served(serving, subject, prompts, settings)
    counts = served_counts(served, prompts, exact.speculative, settings.k, exact_logits(subject))
    return {
        "version": counts["version"],
        "tau": counts["tau"],
        "accepted_per_position": counts["accepted_per_position"],
        "verify_steps": counts["verify_steps"],
        "tokens_equal": counts["equal_to_plain"] == len(prompts),
        "differences": counts["differences"],
        "equal_to_local": counts["equal_to_local"],
        "prompts": len(prompts),
    }


@dataclass(frozen=True)
class Once:
    """An engine that computes each batch once: every fault is compared with the same states."""

    engine: TransformersEngine
    known: dict[tuple[tuple[int, ...], ...], list[States]] = field(default_factory=dict)

    @property
    def identity(self) -> EngineIdentity:
        return self.engine.identity

    def extract(self, batch: Sequence[Tensor]) -> list[States]:
        key = tuple(tuple(ids.tolist()) for ids in batch)
        if key not in self.known:
            self.known[key] = self.engine.extract(batch)
        return self.known[key]


def diagnoses(
    states: StatesDataset, spec: VerifierSpec, head: VerifierHead, documents: int, rows: int
) -> list[dict[str, Any]]:
    """What parity says to each fault put into stored states."""
    every_layer = reference_layers(spec.num_hidden_layers)
    engine = Once(TransformersEngine.open(spec, every_layer, torch.bfloat16, "cpu"))
    stored = [first_rows(states[i], rows) for i in spread(len(states), documents)]
    every = [engine.extract([one.token_ids])[0].aux_TnH for one in stored]
    norm = head_norm(head)
    low, middle, high = states.meta.aux_layers
    last = spec.num_hidden_layers - 1

    def layers(*chosen: int) -> list[Document]:
        return [
            replace(one, aux=full[:, list(chosen)]) for one, full in zip(stored, every, strict=True)
        ]

    def finals(make: Callable[[Document, Tensor], Tensor]) -> list[Document]:
        return [
            replace(one, final=make(one, full).bfloat16())
            for one, full in zip(stored, every, strict=True)
        ]

    def rows_of(make: Callable[[Tensor], Tensor]) -> list[Document]:
        return [replace(one, aux=make(one.aux), final=make(one.final)) for one in stored]

    before_norm = finals(lambda one, full: full[:, last])
    # fault, states with it, whether they are declared pre-norm
    cases: list[tuple[str, list[Document], bool]] = [
        ("none", stored, False),
        ("every layer one too high", layers(low + 1, middle + 1, high + 1), False),
        ("every layer one too low", layers(low - 1, middle - 1, high - 1), False),
        ("aux states in another order", layers(middle, low, high), False),
        ("one aux state of the next layer", layers(low, middle + 1, high), False),
        ("final state without its norm", before_norm, False),
        ("final state normed, said not to be", stored, True),
        ("final state normed twice", finals(lambda one, _: norm(one.final)), False),
        ("states of the token after", rows_of(lambda x: torch.cat([x[1:], x[-1:]])), False),
        ("states of the token before", rows_of(lambda x: torch.cat([x[:1], x[:-1]])), False),
        ("first row missing", rows_of(lambda x: x[1:]), False),
        (
            "every layer one too high, final state without its norm",
            [
                replace(a, final=b.final)
                for a, b in zip(layers(low + 1, middle + 1, high + 1), before_norm, strict=True)
            ],
            False,
        ),
    ]
    found = []
    for fault, documents_with_it, pre_norm in cases:
        declared = Declared(
            aux_layers=tuple(states.meta.aux_layers),
            final_hidden="pre_norm" if pre_norm else "post_norm",
            num_hidden_layers=spec.num_hidden_layers,
        )
        verdict = diagnose(
            list(measured(documents_with_it, engine, head, declared, max_tokens=rows)), declared
        )
        found.append({"fault": fault, "named": [one.text for one in verdict.faults]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", default="data/verifier")
    parser.add_argument("--head", type=Path, default=Path("data/verifier_head.safetensors"))
    parser.add_argument("--states", type=Path, default=Path("data/hidden_states/test"))
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/export/finetune"))
    parser.add_argument("--engines", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    spec, head = VerifierSpec.open(args.verifier), read_head(args.head)
    states = StatesDataset.open(args.states)
    subject = Subject(spec, head, args.checkpoint, "cpu")
    prompts = spread_prompts(states, args.prompts)
    tokens = [states[i].token_ids[:128] for i in spread(len(states), 4)]
    rows = []
    for engine in args.engines:
        error = max_relative_error(engine, spec, head, states.meta.aux_layers, tokens)
        counts = row(engine, subject, prompts, args.tokens)
        rows.append({"engine": engine, "max_relative_error": error, **counts})
        print(rows[-1], flush=True)
    result = {
        "verifier": head.config.verifier,
        "drafter": args.checkpoint.name,
        "dtype": "float32",
        "rows": rows,
        "diagnoses": diagnoses(states, spec, head, documents=4, rows=96),
        KEY: of_benchmark(__file__, args, threads=torch.get_num_threads()),
    }
    write_json(args.out, result)


if __name__ == "__main__":
    main()
