"""Drafters that know a few documents by heart, under a convention of one's choice."""

from __future__ import annotations

from dataclasses import replace

import torch

from eagle3.dataset import Document
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.packing import pack
from eagle3.served_as import LayeredDocument, ServedAs, computed, fed, with_layers
from eagle3.ttt import cast_weights, ttt_steps
from tests.faulty import AUX, Lab

WORDS, PROMPT, LENGTH, DOCUMENTS = 12, 4, 48, 4


def few_words(lab: Lab) -> list[LayeredDocument]:
    """Documents of a dozen tokens at random: what follows cannot be told from the last token, only
    from the verifier's states."""
    rng = torch.Generator().manual_seed(11)
    documents = []
    for number, blank in enumerate(lab.documents()[:DOCUMENTS]):
        tokens = torch.randint(3, 3 + WORDS, (LENGTH,), generator=rng, dtype=torch.int32)
        mask = torch.ones(LENGTH, dtype=torch.uint8)
        mask[:PROMPT] = 0
        documents.append(replace(blank, id=f"{number}", token_ids=tokens, loss_mask=mask))
    return with_layers(documents, lab.engine(torch.float32), lab.head)


def new_drafter(lab: Lab, **switches: bool) -> Drafter:
    """A small drafter with random weights that drafts the first 16 tokens."""
    size = lab.spec.hidden_size
    config = DrafterConfig(
        hidden_size=size,
        target_hidden_size=size,
        intermediate_size=2 * size,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=lab.spec.vocab_size,
        draft_vocab_size=16,
        aux_layers=AUX,
        rms_norm_eps=1e-5,
        rope_theta=20000.0,
        max_position_embeddings=2048,
        **switches,
    )
    drafter = Drafter(config, lab.head.embed.float())
    rng = torch.Generator().manual_seed(5)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=rng)
    drafter.t2d[:16] = True
    return drafter


def memorise(
    drafter: Drafter,
    layered: list[LayeredDocument],
    convention: ServedAs,
    targets: list[torch.Tensor] | None = None,
    steps: int = 60,
) -> None:
    """Trains until the documents are known by heart.

    Args:
        targets: what to draft as the next token of each row, instead of the documents' own.
    """
    made = computed(drafter, convention)
    documents: list[Document] = [fed(item, convention) for item in layered]
    batch = pack(documents, LENGTH)
    rows = torch.arange(len(batch.token_ids_N))
    rows = rows[(rows % LENGTH >= PROMPT - 1) & (rows % LENGTH < LENGTH - 3)]
    wanted = batch.token_ids_N.roll(-1) if targets is None else torch.cat(targets)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        weights = cast_weights(made, torch.float32)
        for step, out in enumerate(ttt_steps(made, weights, batch, rows, 3)):
            logits = out @ weights.head_DH.T
            loss = loss + torch.nn.functional.cross_entropy(logits, wanted[rows + 1 + step])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
