"""From responses to a folder of hidden states: which documents go together, and what is left to do.

Works with any engine; knows neither models nor where the folders of a project lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from eagle3.dataset import Document, StatesMeta
from eagle3.errors import HarnessError
from eagle3.extraction.base import ExtractSettings, States, StatesEngine
from eagle3.responses import Response
from eagle3.shard_writer import ShardWriter


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """What one call did. `tokens` and `seconds` leave out what an earlier, killed one had done."""

    meta: StatesMeta
    tokens: int
    seconds: float


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of documents by batch, longest first: like lengths meet, and little is padding.

    The same lengths give the same batches, and a batch of `batch_tokens` comes first: what doesn't
    fit into memory fails at once.

    Args:
        batch_tokens: bound on documents times longest length; a longer document stands alone.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def extract(
    engine: StatesEngine,
    responses: Sequence[Response],
    folder: Path,
    *,
    meta: StatesMeta,
    settings: ExtractSettings,
    label: str = "extract",
    ahead: int = 1,
) -> Extraction:
    """Writes the states of all responses into `folder`, finished; goes on where a killed call was.

    A batch that a finished shard holds in part is computed in whole again: in another company a
    document's last bits could come out differently.

    Args:
        meta: of the states, counts 0.
        label: what the progress bar calls it.
        ahead: batches asked of the engine at once, from as many threads; what comes back is written
            in the order of the plan all the same.

    Raises:
        HarnessError: names the sample whose states have a row too many or too few, or a NaN.
    """
    writer = ShardWriter(folder, meta, settings.shard_bytes)
    done = writer.done
    if unknown := done - {response.id for response in responses}:
        raise HarnessError(
            "unfinished states are those of other responses", where=folder,
            rule="samples of the responses given",
            got=f"sample {min(unknown)}", fix="delete the folder",
        )  # fmt: skip
    lengths = [len(response.token_ids) for response in responses]
    kept = sum(length for length, one in zip(lengths, responses, strict=True) if one.id in done)
    tokens, started = 0, perf_counter()
    with tqdm(total=sum(lengths), initial=kept, unit="tok", unit_scale=True, desc=label) as bar:
        planned = [
            [responses[index] for index in batch]
            for batch in plan_batches(lengths, settings.batch_tokens)
        ]
        open_batches = [batch for batch in planned if any(one.id not in done for one in batch)]
        for members, states in _answers(engine, open_batches, ahead):
            if len(states) != len(members):
                raise HarnessError(
                    "the engine dropped documents", where=f"batch of sample {members[0].id}",
                    rule=f"{len(members)} documents", got=len(states),
                    fix="a fault of the engine: report it, or extract with another extract.backend",
                )  # fmt: skip
            missing = 0
            for response, one in zip(members, states, strict=True):
                if response.id not in done:
                    writer.add(_document(response, one))
                    missing += len(response.token_ids)
            tokens += missing
            bar.update(missing)
    return Extraction(meta=writer.finish(), tokens=tokens, seconds=perf_counter() - started)


Batch = list[Response]


def _answers(
    engine: StatesEngine, batches: Sequence[Batch], ahead: int
) -> Iterator[tuple[Batch, list[States]]]:
    """Every batch with its states, in order; no more than `ahead` of them are held or asked."""

    def ask(batch: Batch) -> list[States]:
        return engine.extract([one.tokens() for one in batch])

    if ahead == 1:
        yield from ((batch, ask(batch)) for batch in batches)
        return
    threads = ThreadPoolExecutor(ahead, thread_name_prefix="extract")
    waiting: deque[tuple[Batch, Future[list[States]]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, threads.submit(ask, batch)))
            if len(waiting) == ahead:
                first, states = waiting.popleft()
                yield first, states.result()
        for batch, states in waiting:
            yield batch, states.result()
    finally:
        # Without waiting: whoever opened the engine ends what it still works on.
        threads.shutdown(wait=False, cancel_futures=True)


def _document(response: Response, states: States) -> Document:
    return Document(
        id=response.id,
        source=response.source,
        token_ids=response.tokens(),
        loss_mask=response.mask(),
        aux=states.aux_TnH,
        final=states.final_TH,
        verifier_top1=states.top1_T,
        verifier_lse=states.lse_T,
    )
