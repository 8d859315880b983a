"""Draft trees: how one is laid out, and which of its drafts the verifier's argmax accepts.

A tree of T rows a request: row 0 is the last token, rows 1 .. T-1 are drafts in the order of
`selected_index`. A row's children are a linked list: `retrieve_next_token` names the first child,
`retrieve_next_sibling` the next child of the same parent, -1 none.

Shape suffixes: B requests, T rows of a tree.
"""

from __future__ import annotations

from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fills in links, positions and the mask of each request's tree.

    Args:
        parent_list: i64[B, …]; entry p is the candidate that spawned the p-th group of `topk`
            candidates. Group 0 was spawned by the last token.
        selected_index: i64[B, T-1], candidates that were kept as drafts, ascending.
        tree_mask: flat, True where a row sees a column. FULL_MASK: T rows of (length + T) columns
            a request, True before the drafts already. QLEN_ONLY: T rows of T columns.
        positions: [B * T], filled with length + depth in the tree.
        retrieve_next_token, retrieve_next_sibling: [B, T], -1 to begin with.
    """
    mode, rows = int(tree_mask_mode), draft_token_num
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {mode}")
    mask_start = 0
    for b, length in enumerate(verified_seq_len.tolist()):
        selected = selected_index[b].tolist()
        parents = [0]  # row of each row's parent
        for candidate in selected:
            group = candidate // topk
            spawner = int(parent_list[b, group]) if group else None
            kept = spawner is None or spawner in selected
            # A draft whose own parent was not kept (a tie of scores) stays without a link.
            parents.append(
                -1 if not kept else 0 if spawner is None else selected.index(spawner) + 1
            )
        first, sibling = [-1] * rows, [-1] * rows
        for row in range(rows - 1, 0, -1):  # backwards, so that the first child comes first
            if parents[row] >= 0:
                sibling[row], first[parents[row]] = first[parents[row]], row
        retrieve_next_token[b] = retrieve_next_token.new_tensor(first)
        retrieve_next_sibling[b] = retrieve_next_sibling.new_tensor(sibling)
        retrieve_index[b] = retrieve_index.new_tensor(range(b * rows, (b + 1) * rows))
        width = length + rows if mode == FULL_MASK else rows
        block = tree_mask[mask_start : mask_start + rows * width].view(rows, width)
        block[:, width - rows :] = 0
        for row in range(rows):
            block[row, width - rows] = 1
            above, at = row, 0
            while above > 0:
                block[row, width - rows + above] = 1
                at, above = at + 1, parents[above]
            positions[b * rows + row] = length + at
        mask_start += rows * width


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each tree from its root as long as a child is the verifier's argmax.

    Args:
        predicts: [B * T], at each accepted row the token that follows it.
        accept_index: [B, depth], accepted rows, the root first; -1 after them.
        accept_token_num: [B], accepted drafts, the root not counted.
        candidates, target_predict: [B, T], tokens of the rows and the verifier's argmax after them.
        retrive_index, retrive_next_token, retrive_next_sibling: [B, T], as built.
    """
    flat_target = target_predict.flatten().tolist()
    for b in range(len(candidates)):
        tokens, index = candidates[b].tolist(), retrive_index[b].tolist()
        first, sibling = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        row, accepted = 0, 0
        accept_index[b, 0] = index[0]
        while True:
            wanted = flat_target[index[row]]
            predicts[index[row]] = wanted
            child = first[row] if accepted + 1 < accept_index.shape[1] else -1
            while child != -1 and tokens[child] != wanted:
                child = sibling[child]
            if child == -1:
                break
            row, accepted = child, accepted + 1
            accept_index[b, accepted] = index[row]
        accept_token_num[b] = accepted


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request; `accept_lens` counts it."""
    flat = accept_tokens.flatten()
    for b, length in enumerate(accept_lens.tolist()):
        bonus_tokens[b] = flat[accept_stride * b + length - 1]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None,
) -> None:
    """Shifts each request's tokens left by one in place; the new token comes last, or at row
    `select_index` of the batch."""
    new = topk_index.flatten()
    for b, (start, length) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[b])
        input_ids[last] = new[b]
