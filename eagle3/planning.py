"""What a run will take: tokens, bytes on disk, memory for training, hours. Arithmetic alone.

Opens no weight and no data; speeds are stated by whoever asks. Numbers of memory are of one device
and of what training holds at its peak, allocator overhead aside.

Legend: H hidden size of verifier and drafter, V and D their vocabularies, n aux layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import PositiveFloat, PositiveInt

from eagle3.settings import Settings

TOKEN_BYTES = 4 + 4 + 4 + 1  # token id, argmax, log-sum-exp, mask
# Bytes of a number and of the scale of a row: as they are in a dtype, and in codec fp8 of any.
CODECS = {"float32": (4, 0), "bfloat16": (2, 0), "fp8": (1, 4)}
# Weight, gradient and two moments in float32, and the copy in bfloat16 that a step computes with.
TRAINED_BYTES, RESUME_BYTES, STORED_BYTES = 4 * 4 + 2, 3 * 4, 2
DECODINGS = 4  # plainly and with drafts: timed, and in fp32 to compare token for token
FEW_SAMPLES = 100_000
LOSS_ROWS = 512
GIB = 1 << 30


class Shape(Settings):
    """Sizes of a verifier, for one that is not at hand."""

    model_type: str
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    vocab_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt


class PlanSettings(Settings):
    """What `eagle3 plan` cannot know.

    prompt_tokens, response_tokens: mean lengths.
    generate_tokens_per_s, extract_tokens_per_s, train_tokens_per_s: speeds, measured or expected,
        of the machines that will do it.
    test_prompts: of all benchmarks under `prompts.test`; None: unknown, not counted.
    decode_tokens_per_s: of one sequence alone, as evaluation decodes; None: unknown.
    shape: of a verifier whose configuration is not at hand; checked where it is.
    """

    prompt_tokens: PositiveFloat
    response_tokens: PositiveFloat
    generate_tokens_per_s: PositiveFloat
    extract_tokens_per_s: PositiveFloat
    train_tokens_per_s: PositiveFloat
    test_prompts: PositiveInt | None = None
    decode_tokens_per_s: PositiveFloat | None = None
    shape: Shape | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run, in numbers.

    Attributes:
        budgets: packed rows that each arm trains on; None for passes over the data.
        epochs: of arms without a budget.
        writes: whether the verifier writes the training prompts itself.
        test_prompts: None for unknown.
        decoded: tokens that evaluation decodes for real, in each of its ways.
        batch_rows: rows of one forward pass, as long as the longest document may be.
    """

    verifier: Shape
    samples: int
    dev_share: float
    prompt_tokens: float
    response_tokens: float
    max_length: int
    aux_layers: int
    draft_vocabulary: int
    drafter: Shape
    ttt_steps: int
    batch_rows: int
    trained_head: bool
    budgets: Mapping[str, int | None]
    epochs: Mapping[str, int | None]
    speeds: Mapping[str, float]
    writes: bool = False
    test_prompts: int | None = None
    decoded: int = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Of one task; sizes in bytes, times in hours.

    Attributes:
        tokens, supervised: of all training and dev documents, and of their answers.
        token_bytes, disk: by codec.
        trained: parameters.
        memory: by what takes it.
        head_file, checkpoint, resume: of the verifier's head, a checkpoint and a resume state.
        hours: by step of the pipeline.
    """

    tokens: int
    supervised: int
    token_bytes: dict[str, int]
    disk: dict[str, int]
    trained: int
    memory: dict[str, float]
    head_file: float
    checkpoint: float
    resume: float
    hours: dict[str, float]


def head_widths(drafter: Shape) -> tuple[int, int]:
    """Of all queries of a row, and of all its keys."""
    return (
        drafter.num_attention_heads * drafter.head_dim,
        drafter.num_key_value_heads * drafter.head_dim,
    )


def trained_parameters(drafter: Shape, states: int, aux_layers: int) -> int:
    """Of the draft layer, `fc` and norms, without its head.

    Args:
        states: width of one aux state.
    """
    hidden = drafter.hidden_size
    heads, groups = head_widths(drafter)
    attention = 2 * hidden * (heads + 2 * groups) + heads * hidden
    return (
        aux_layers * states * hidden
        + attention
        + 3 * hidden * drafter.intermediate_size
        + 4 * hidden
    )


def estimate(task: Task) -> Estimate:
    """Works it all out."""
    verifier, drafter = task.verifier, task.drafter
    length = min(task.prompt_tokens + task.response_tokens, float(task.max_length))
    tokens = round(task.samples * length)
    supervised = round(task.samples * task.response_tokens)
    vectors = task.aux_layers + 1
    token_bytes = {
        name: vectors * (verifier.hidden_size * size + scale) + TOKEN_BYTES
        for name, (size, scale) in CODECS.items()
    }
    hidden, drafts = drafter.hidden_size, task.draft_vocabulary
    body = trained_parameters(drafter, verifier.hidden_size, task.aux_layers)
    head = drafts * hidden
    trained = body + (head if task.trained_head else 0)
    rows = task.batch_rows
    heads, groups = head_widths(drafter)
    # Kept for the backward pass by each TTT step: inputs of the products and of the norms.
    kept = 6 * hidden + 2 * heads + 2 * groups + 3 * drafter.intermediate_size
    memory = {
        "trained weights, gradients and moments": float(TRAINED_BYTES * trained),
        "embedding of the verifier": 2.0 * verifier.vocab_size * hidden,
        "heads of drafter and verifier, frozen": 2.0 * head * (1 if task.trained_head else 2),
        "states of a batch": 2.0 * rows * vectors * verifier.hidden_size,
        "activations of all TTT steps": 2.0 * rows * kept * task.ttt_steps,
        "logits of a chunk": 4.0 * 3 * min(rows, LOSS_ROWS) * drafts,
    }
    if task.trained_head:
        memory["target distributions"] = 2.0 * rows * drafts
    training = tokens * (1 - task.dev_share)
    tests = task.test_prompts or 0
    test_tokens = round(tests * length)
    answered = supervised + tests * task.response_tokens
    written = task.samples * task.prompt_tokens if task.writes else 0.0
    hours = {
        "prompts": written / task.speeds["generate"] / 3600,
        "responses": answered / task.speeds["generate"] / 3600,
        "hidden states": (tokens + test_tokens) / task.speeds["extract"] / 3600,
    }
    for arm, budget in task.budgets.items():
        learnt = budget if budget is not None else training * (task.epochs[arm] or 1)
        hours[f"training {arm}"] = learnt / task.speeds["train"] / 3600
    if task.test_prompts is not None and "decode" in task.speeds:
        # A replayed token costs at most what a trained one does.
        replayed = test_tokens / task.speeds["train"]
        decoded = DECODINGS * task.decoded / task.speeds["decode"]
        hours["evaluation, each arm"] = (replayed + decoded) / 3600
    return Estimate(
        tokens=tokens,
        supervised=supervised,
        token_bytes=token_bytes,
        disk={name: tokens * size for name, size in token_bytes.items()},
        trained=trained,
        memory=memory,
        head_file=2.0 * 2 * verifier.vocab_size * verifier.hidden_size,
        checkpoint=float(STORED_BYTES * (body + head)),
        resume=float(RESUME_BYTES * trained),
        hours=hours,
    )


def warnings(
    task: Task, found: Estimate, *, free: float, device_memory: float | None, stored: str
) -> list[str]:
    """What to think of before it starts.

    Args:
        free: bytes on the disk that the data will lie on.
        device_memory: bytes of the training device, None for unknown.
        stored: the one of `CODECS` in use.
    """
    said = []
    if task.samples < FEW_SAMPLES:
        said.append(
            f"{task.samples:,} samples are far fewer than the 300,000 to 1.4 million that "
            "published drafters were trained on: expect a lower acceptance length"
        )
    need = found.disk[stored] + found.head_file
    if need > free:
        others = [name for name in CODECS if found.disk[name] + found.head_file <= free]
        said.append(
            f"the disk is too small: {need / GIB:,.0f} GiB needed as {stored}, {free / GIB:,.0f} "
            f"GiB free; {'fits as ' + ', '.join(others) if others else 'extract fewer samples'}"
        )
    peak = sum(found.memory.values())
    if device_memory is not None and peak > device_memory:
        said.append(
            f"training needs {peak / GIB:,.1f} GiB, the device has {device_memory / GIB:,.1f}: "
            "lower train.batch_tokens or train.max_length"
        )
    if task.prompt_tokens + task.response_tokens > task.max_length:
        said.append(
            f"documents are cut: {task.prompt_tokens + task.response_tokens:,.0f} tokens on "
            f"average, train.max_length {task.max_length:,}"
        )
    seen = found.tokens * (1 - task.dev_share)
    said += [
        f"arm {arm} trains on {budget:,} tokens, {budget / seen:.1f} times the data"
        for arm, budget in task.budgets.items()
        if budget is not None and budget > 10 * seen
    ]
    return said
