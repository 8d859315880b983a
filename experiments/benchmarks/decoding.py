"""What speculative decoding brings here beside what its parts allow, with transformers as a peer.

`make bench-decode` runs it on the pipeline's own verifier, drafter and test prompts. All ways of
decoding take turns on every prompt, each in turn first, in one process: transformers' `generate`,
its prompt-lookup decoding (drafts copied from the text so far, no second model), and this project's
plain and speculative decoding. After each prompt the parts are timed by themselves, in turns too.
The bound is τ / (r + k·c) of these parts; its share says how much is lost between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eagle3.acceptance import acceptance_length
from eagle3.chain import ChainProposer
from eagle3.chat import encode_prompt
from eagle3.decode import Clock, Decoded, Verifier, plain_decode, speculative_decode
from eagle3.drafter import Drafter
from eagle3.errors import HarnessError
from eagle3.evaluate import Subject
from eagle3.lean_drafter import LeanDrafter
from eagle3.lean_verifier import LeanVerifier, decoding_verifier
from eagle3.machine import keep_freed_memory
from eagle3.prompts import read_prompts
from eagle3.statistics import speed_up
from eagle3.timing import Run, clock_of, measure
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import read_head
from eagle3.verifier_model import load_tokenizer
from eagle3.workspace import write_json
from experiments.evidence import KEY, of_benchmark

WARM_UP_TOKENS = 8
GENERATE, LOOKUP = "transformers_generate", "transformers_prompt_lookup"
PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass
class Parts:
    """Seconds of each timing of one plain step, one verification, one chain of drafts."""

    plain: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    chain: list[float] = field(default_factory=list)

    def costs(self, k: int) -> tuple[float, float, float]:
        """Seconds of a plain step; r and c, the costs of a verification and of a draft in it."""
        plain, verify, chain = (
            statistics.median(one) for one in (self.plain, self.verify, self.chain)
        )
        return plain, verify / plain, chain / k / plain


def time_parts(
    parts: Parts,
    verifier: Verifier,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    k: int,
    repeats: int,
    clock: Clock,
) -> None:
    """Adds timings of each part behind a prompt, in turns."""
    prompt = torch.tensor(prompt_ids, device=verifier.device)
    verifier.reset()
    aux_NLH = verifier.forward(prompt, 1).aux_NLH
    proposer = ChainProposer(drafter)
    proposer.observe(prompt.roll(-1), aux_NLH)

    def forward(rows: int) -> Tensor:
        logits_MV = verifier.forward(prompt[:1].expand(rows), rows).logits_MV
        logits_MV.argmax(-1).tolist()  # waits for the result, as decoding does
        return logits_MV

    def chain() -> None:
        proposer.propose(k).token_ids_k.tolist()
        proposer.observe(prompt[:1], aux_NLH[:1])

    for _ in range(repeats):
        for seconds, part in (
            (parts.plain, lambda: forward(1)),
            (parts.verify, lambda: forward(k + 1)),
            (parts.chain, chain),
        ):
            started = clock()
            part()
            seconds.append(clock() - started)
            verifier.crop(len(prompt))


@dataclass(frozen=True)
class Peer:
    """transformers' own decoding: new tokens, and the seconds that they took."""

    token_ids: list[int]
    seconds: float


def transformers_decode(
    model: Any, prompt_ids: Sequence[int], max_tokens: int, clock: Clock, **how: Any
) -> Peer:
    """Greedy `generate`; it stops at the EOS of its generation config.

    Args:
        how: further arguments, as `prompt_lookup_num_tokens`.
    """
    ids = torch.tensor([prompt_ids], device=model.device)
    started = clock()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        **how,
    )
    return Peer(out[0, len(prompt_ids) :].tolist(), clock() - started)


def compare(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_tokens: int,
    dtype: torch.dtype,
    repeats: int,
) -> dict[str, Any]:
    """All ways of decoding over all prompts, and the parts.

    Returns:
        Plain values: tokens a second with prompts included for each way; τ, the parts, the bound on
        the speed-up of decoding, the speed-up that was reached, and its share of the bound.
    """
    stock: Any = subject.model(dtype)
    eos = sorted(subject.eos_ids)
    # In float32 packing pays for several rows and costs for one: plain decoding is at its best.
    pack = dtype == torch.bfloat16
    drafter = LeanDrafter(subject.drafter(dtype), pack=pack)
    verifier = decoding_verifier(subject.model(dtype), drafter.config.aux_layers, pack=pack)
    clock = clock_of(verifier.device)

    def peer(prompt: Sequence[int], tokens: int, **how: Any) -> Peer:
        ends = {"eos_token_id": eos, "pad_token_id": eos[0]}
        return transformers_decode(stock, prompt, tokens, clock, **ends, **how)

    def plain(prompt: Sequence[int], tokens: int) -> Decoded:
        return plain_decode(
            verifier, prompt, max_tokens=tokens, eos_ids=subject.eos_ids, clock=clock
        )

    def speculative(prompt: Sequence[int], tokens: int) -> Decoded:
        return speculative_decode(
            verifier,
            ChainProposer(drafter),
            prompt,
            k=k,
            max_tokens=tokens,
            eos_ids=subject.eos_ids,
            clock=clock,
        )

    ways: dict[str, Callable[[Sequence[int], int], Peer | Decoded]] = {
        GENERATE: peer,
        LOOKUP: lambda prompt, tokens: peer(prompt, tokens, prompt_lookup_num_tokens=k),
        PLAIN: plain,
        SPECULATIVE: speculative,
    }
    for decode in ways.values():
        decode(prompts[0], WARM_UP_TOKENS)
    done: dict[str, list[Any]] = {name: [] for name in ways}
    parts = Parts()
    for number, prompt in enumerate(tqdm(prompts, desc="decoding", unit="prompt")):
        names = list(ways)
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            done[name].append(ways[name](prompt, max_tokens))
        time_parts(parts, verifier, drafter, prompt, k=k, repeats=repeats, clock=clock)
    verifier.close()
    return {
        "engine": "lean" if isinstance(verifier, LeanVerifier) else "transformers' forward",
        "tokens_per_s": {
            name: sum(len(one.token_ids) for one in results) / sum(one.seconds for one in results)
            for name, results in done.items()
        },
        "same_text_as_plain": {
            name: sum(
                one.token_ids == other.token_ids
                for one, other in zip(results, done[PLAIN], strict=True)
            )
            for name, results in done.items()
            if name != PLAIN
        },
        **shares(Run(done[PLAIN], done[SPECULATIVE]), parts, k),
    }


def shares(run: Run, parts: Parts, k: int) -> dict[str, float]:
    """The speed-up that was reached beside what its parts allow, prompts left out of both."""
    plain_step, r, c = parts.costs(k)
    steps = sum(one.verify_steps for one in run.speculative)
    tau = acceptance_length(sum(one.accepted for one in run.speculative), steps)
    bound, reached = speed_up(tau, r, c, k), measure(run, k)
    return {
        "tau": tau,
        "plain_step_seconds": plain_step,
        "r": r,
        "c": c,
        "bound": bound,
        "speedup_decoding": reached["speedup_decoding"],
        "speedup": reached["speedup"],
        "share_of_bound": reached["speedup_decoding"] / bound,
    }


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of them, evenly spaced; all where there are fewer."""
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", default="data/verifier", help="folder or hub id")
    parser.add_argument("--head", type=Path, default=Path("data/verifier_head.safetensors"))
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/finetune"))
    parser.add_argument("--prompts", type=Path, default=Path("data/prompts/test.jsonl"))
    parser.add_argument("--count", type=int, default=16, help="of the prompts, evenly spaced")
    parser.add_argument("--tokens", type=int, default=64, help="new ones a prompt, at most")
    parser.add_argument("--k", type=int, default=3, help="drafts a verification step")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="timings of each part a prompt")
    parser.add_argument("--out", type=Path, default=Path("reports/bench_decode.json"))
    return parser.parse_args(arguments)


def check(args: argparse.Namespace) -> None:
    """Refuses what cannot be measured, before anything is loaded.

    Raises:
        HarnessError: something to measure with is missing, or a number makes no sense.
    """
    for name in ("head", "checkpoint", "prompts"):
        if not getattr(args, name).exists():
            raise HarnessError(
                "the benchmark has nothing to decode with",
                where=getattr(args, name),
                rule=f"--{name}, an output of the pipeline",
                fix="make repro, or name another one",
            )
    for name in ("count", "k", "threads", "repeats"):
        if getattr(args, name) < 1:
            raise HarnessError("too small", where=f"--{name}", rule="at least 1",
                               got=getattr(args, name))  # fmt: skip
    if args.tokens < 2:
        raise HarnessError("too small", where="--tokens", rule="at least 2", got=args.tokens)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; what was measured, with what, as plain values.

    Raises:
        HarnessError: inputs that are missing or do not fit each other.
    """
    check(args)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    spec = VerifierSpec.open(args.verifier)
    subject = Subject(spec, read_head(args.head), args.checkpoint, args.device)
    tokenizer = load_tokenizer(spec)
    prompts = [
        encode_prompt(tokenizer, item.question().as_messages(), item.as_tools())
        for item in spread(read_prompts(args.prompts), args.count)
    ]
    import transformers

    return {
        "verifier": spec.verifier,
        "drafter": args.checkpoint.name,
        "k": args.k,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "prompts": len(prompts),
        "max_tokens": args.tokens,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **compare(
            subject,
            prompts,
            k=args.k,
            max_tokens=args.tokens,
            dtype=getattr(torch, args.dtype),
            repeats=args.repeats,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        result = run(args)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2))
    write_json(args.out, {**result, KEY: of_benchmark(__file__, args, threads=args.threads)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
