"""A tiny drafter in float64, batches for it, and a language that it can learn."""

from __future__ import annotations

import itertools

import torch

from eagle3.dataset import Document
from eagle3.drafter import Drafter, DrafterConfig
from eagle3.loss import TargetHead
from eagle3.packing import Batch
from eagle3.train_settings import TrainSettings
from eagle3.train_step import TrainData
from eagle3.vocab import DraftVocabulary

VOCAB, DRAFT, HIDDEN = 40, 23, 16


def make_drafter(seed: int = 0, **switches: bool) -> Drafter:
    config = DrafterConfig(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT,
        aux_layers=(0, 2, 3),
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        max_position_embeddings=64,
        **switches,
    )
    draw = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, torch.randn(VOCAB, HIDDEN, generator=draw)).double()
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.4
    target = torch.randperm(VOCAB, generator=draw)[:DRAFT].sort().values
    drafter.d2t.copy_(target - torch.arange(DRAFT))
    drafter.t2d[target] = True
    return drafter


def vocabulary_of(drafter: Drafter) -> DraftVocabulary:
    return DraftVocabulary(d2t=drafter.d2t, t2d=drafter.t2d)


def make_batch(lengths: list[int], masks: list[list[int]], seed: int = 1) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ends = list(itertools.accumulate(lengths))
    return Batch(
        ids=tuple(str(i) for i in range(len(lengths))),
        token_ids_N=torch.randint(VOCAB, (total,), generator=draw),
        loss_mask_N=torch.tensor(list(itertools.chain(*masks))).bool(),
        document_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        positions_N=torch.cat([torch.arange(n) for n in lengths]),
        spans=tuple((end - n, end) for n, end in zip(lengths, ends, strict=True)),
        aux_NPG=torch.randn(total, 3, HIDDEN, generator=draw, dtype=torch.float64),
        final_NG=torch.randn(total, HIDDEN, generator=draw, dtype=torch.float64),
        top1_N=torch.randint(VOCAB, (total,), generator=draw),
        lse_N=torch.randn(total, generator=draw, dtype=torch.float64) + 4.0,
    )


RAGGED = (
    [9, 1, 2, 14],
    [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1], [0, 1], [0, 1, 1, 0, 0, 1, 1, 1] + [1] * 6],
)


def make_documents(count: int, seed: int = 0, tail: int = 0) -> list[Document]:
    """A language that can be learnt: the next token is a function of the last one."""
    draw = torch.Generator().manual_seed(seed)
    follow = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(99))
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(98))
    documents = []
    for index in range(count):
        length = int(torch.randint(8, 20, (1,), generator=draw)) + tail
        tokens = [int(torch.randint(VOCAB, (1,), generator=draw))]
        while len(tokens) < length:
            tokens.append(int(follow[tokens[-1]]))
        ids = torch.tensor(tokens)
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[3 : length - tail] = 1
        following = follow[ids]
        documents.append(
            Document(
                id=f"{seed}-{index}",
                source="made",
                token_ids=ids.int(),
                loss_mask=mask,
                aux=table[ids][:, None].repeat(1, 3, 1).bfloat16(),
                # Through the identity head below, these logits single out the next token.
                final=(20.0 * torch.nn.functional.one_hot(following % HIDDEN, HIDDEN)).bfloat16(),
                verifier_top1=following.int(),
                verifier_lse=torch.zeros(length),
            )
        )
    return documents


def make_data(drafter: Drafter, count: int = 40) -> TrainData:
    vocabulary = vocabulary_of(drafter)
    rows = torch.nn.functional.one_hot(vocabulary.target_ids % HIDDEN, HIDDEN).float()
    documents = make_documents(count)
    lengths = [len(document.token_ids) for document in documents]
    dev = make_documents(6, seed=1, tail=4)
    return TrainData(documents, lengths, dev, TargetHead(rows, None, 1e-5, None), vocabulary)


SETTINGS = TrainSettings.model_validate(
    {
        "lr": 0.01,
        "batch_tokens": 64,
        "dtype": "float32",
        "evaluations": 4,
        "log_every": 2,
        "save_every": 3,
        "objective": {"ttt_steps": 2},
        "drafter": {"head": "trained"},
        "noise": {"kind": "gaussian_relative", "std": 0.1},
        "dev_drafts": 2,
    }
)
