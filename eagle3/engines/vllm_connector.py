"""Runs inside vLLM: writes the hidden states of finished requests as safetensors.

On top of vLLM's own connector, which pins host memory and copies on a CUDA stream, and so fails on
a machine without a GPU. Here a file also says which layers its columns are, and appears whole or
not at all. Imported by the interpreter that vLLM is installed in; knows nothing of verifiers.
"""

from __future__ import annotations

import fcntl
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)

LAYER_IDS = "layer_ids"  # metadata of a file, as vLLM counts


class _Copied:
    """Stands for the event of a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Files of `hidden_states` [T, n, H], columns in ascending layer order, and `token_ids` [T]."""

    def _layer_ids(self) -> list[int]:
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        # vLLM collects states while it runs through the layers, whatever the order of the ids.
        return sorted(config.eagle_aux_hidden_state_layer_ids)

    def _write_tensors(
        self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        try:
            event.synchronize()
            part = f"{filename}.part"
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, part, {LAYER_IDS: json.dumps(self._layer_ids())})
            Path(part).replace(filename)
        finally:
            if lock_fd is not None:
                os.close(lock_fd)  # lets the client, which waits for the lock, read on

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        # Indexing copies: the blocks may be given to another request from here on.
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        copied = _Copied()
        future = self._executor.submit(
            self._write_tensors, tensors, copied, pending.filename, lock_fd
        )
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
