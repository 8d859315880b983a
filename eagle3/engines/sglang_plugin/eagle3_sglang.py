"""An SGLang plugin that writes a request's hidden states into a file instead of its answer.

Active in a server whose environment sets EAGLE3_STATES_DIR. A request that asks for hidden states
then leaves `<rid>.safetensors` in that folder, there before its answer is: `aux` [T, n*H], the
captured layers side by side in ascending order; `final` [T, H], after the verifier's last norm;
`token_ids` i32[T]; and SGLang's `layer_ids` as metadata. A request whose rows are not all there is
refused with the reason.

Knows nothing of what the states are for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

FOLDER = "EAGLE3_STATES_DIR"
TARGET = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._append_prefill_hidden_states"
)
SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


def register() -> None:
    """What SGLang calls in each of its processes."""
    if not os.environ.get(FOLDER):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, write_states, HookType.AROUND)


def write_states(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """In place of turning a prefill's rows of one request into lists of floats.

    Returns:
        The offset of the next request's rows, as the original does.
    """
    req = kwargs["req"]
    if req.return_hidden_states is not True:
        return original(*args, **kwargs)
    start, rows = kwargs["hidden_state_offset"], kwargs["extend_input_len"]
    output = kwargs["logits_output"]
    if kwargs.get("store", True) and _is_first_rank():
        reason = _why_not(req, output, kwargs["capture_hidden_mode"], rows)
        if reason is None:
            _write(req, output, slice(start, start + rows))
        else:
            _refuse(req, reason)
    return start + rows if kwargs["capture_hidden_mode"].is_full() else start + 1


def _is_first_rank() -> bool:
    """Every rank of a tensor-parallel group holds the same states; one of them writes."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_tp_rank == 0)


def _why_not(req: Any, output: Any, mode: Any, rows: int) -> str | None:
    """Why a request cannot be served whole, if it cannot."""
    if not mode.is_full():
        return "the server keeps the last row only: start it with --return-hidden-states-mode full"
    if getattr(output, "last_hidden_states", None) is None:
        return (
            "no final states: start the server with --enable-return-aux-hidden-states and "
            "--speculative-algorithm EAGLE3"
        )
    tokens = len(req.origin_input_ids)
    if rows != tokens:
        return (
            f"{rows} rows for {tokens} tokens: the others come from the prefix cache or from an "
            "earlier chunk; start the server with --disable-radix-cache --chunked-prefill-size -1"
        )
    if not SAFE_NAME.fullmatch(str(req.rid)):
        return "its rid is no file name: letters, digits, - and _"
    return None


def _refuse(req: Any, reason: str) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = f"eagle3 states: {reason}"
    req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def _write(req: Any, output: Any, rows: slice) -> None:
    import torch
    from safetensors.torch import save_file
    from sglang.srt.runtime_context import get_exec

    folder = Path(os.environ[FOLDER])
    part = folder / f".{req.rid}.part"
    states = {
        "aux": output.hidden_states[rows],
        "final": output.last_hidden_states[rows],
    }
    tensors = {name: value.detach().cpu().contiguous() for name, value in states.items()}
    # Views of the whole batch would be written whole.
    tensors = {
        name: value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        for name, value in tensors.items()
    }
    tensors["token_ids"] = torch.tensor(list(req.origin_input_ids), dtype=torch.int32)
    layer_ids = get_exec().features.return_aux_hidden_state_layer_ids
    save_file(tensors, part, metadata={"layer_ids": json.dumps(layer_ids)})
    part.chmod(0o644)
    part.replace(folder / f"{req.rid}.safetensors")
