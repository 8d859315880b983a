"""Which slots of the key-value pool belong to which tokens.

`req_to_token` i32[requests, pool_len] names the slot of each token of each request; the requests of
a batch are rows `req_pool_indices` of it. Ragged outputs hold the requests' pieces end to end.

Shape suffixes: B requests of a batch, P pool_len.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from torch import Tensor


def _pieces(
    requests_B: Tensor, starts_B: Tensor, ends_B: Tensor
) -> Iterator[tuple[int, int, int, int]]:
    """Row, start, end and offset in the ragged tensor, request by request."""
    offset = 0
    for row, start, end in zip(
        requests_B.tolist(), starts_B.tolist(), ends_B.tolist(), strict=True
    ):
        yield row, start, end, offset
        offset += end - start


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes ragged slots into tokens [start, end) of each request."""
    for row, start, end, offset in _pieces(req_pool_indices, start_offset, end_offset):
        piece = out_cache_loc[offset : offset + end - start]
        req_to_token[row, start:end] = piece.to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Reads the slots of tokens [start, end) of each request into a ragged tensor."""
    for row, start, end, offset in _pieces(req_pool_indices, start_offset, end_offset):
        piece = req_to_token[row, start:end]
        out_cache_loc[offset : offset + end - start] = piece.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Reads the `topk * steps` slots after the last token of each request."""
    ends = seq_lens + topk * speculative_num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """A table [B * topk, P] for drafting: each branch sees the request's tokens, then its own
    drafts. The slots after the tokens are `topk` runs of `num_steps`, a run for each branch."""
    table = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    for number, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        for branch in range(topk):
            start = length + branch * num_steps
            run = req_to_token[row, start : start + num_steps]
            table[number * topk + branch, length : length + len(run)] = run
    return table


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """The slots of accepted rows, packed to the front; -1 in `accept_index` is no row."""
    rows = accept_index.flatten()
    rows = rows[rows > -1].long()
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copies slots within every layer's buffer, given by address and bytes a slot. All sources are
    read before the first target is written, since they may be the same slots."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(address + slot * size, size) for slot in sources]
        for slot, content in zip(targets, held, strict=True):
            ctypes.memmove(address + slot * size, content, size)
