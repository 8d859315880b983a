"""What is wrong with stored states, in words: the fewest faults that explain what was measured.

Takes what `eagle3.parity_verdict` found. Knows neither engines nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from eagle3.parity import EMBEDDINGS, Declared, Measured, Reading
from eagle3.parity_verdict import Slot, judge

Kind = Literal[
    "layer_offset",
    "aux_order",
    "aux_layer",
    "aux_norm",
    "final_layer",
    "final_norm",
    "rows_missing",
    "rows_shifted",
    "rows_out_of_step",
    "rows_wrong",
    "unknown",
]
MANY_LAYERS = 5  # from so many aux layers on, only a reversed order is tried
OUT_OF_STEP = 0.1  # share of rows


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, and a sentence for the person who has to act."""

    kind: Kind
    text: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict over all documents compared; no fault: serving sees what is stored."""

    documents: int
    rows: int
    slots: list[Slot]
    faults: list[Fault]

    @property
    def largest_error(self) -> float:
        """Of the stored tensors as they are declared."""
        return max(slot.error_declared for slot in self.slots)


def diagnose(documents: Sequence[Measured], declared: Declared) -> Diagnosis:
    """Names every fault of the documents measured.

    Raises:
        ValueError: no document.
    """
    slots = judge(documents, declared)
    faults: list[Fault] = []
    if not all(slot.right for slot in slots) or any(d.rows != d.tokens for d in documents):
        *aux, final = slots
        faults += [_unknown(slot) for slot in slots if not slot.known]
        faults += _row_faults(documents, slots)
        faults += _layer_faults([slot for slot in aux if slot.known], declared)
        faults += [
            Fault("aux_norm", f"{slot.name} went through the verifier's last norm{_times(slot)}")
            for slot in aux
            if slot.known and slot.found.norms
        ]
        if final.known:
            faults += _final_faults(final, declared)
    faults += _wrong_rows(documents, slots)
    return Diagnosis(
        documents=len(documents),
        rows=sum(item.rows for item in documents),
        slots=slots,
        faults=faults,
    )


def named(reading: Reading) -> str:
    """A reading in words."""
    layer = (
        "the embeddings, the input of layer 0"
        if reading.layer == EMBEDDINGS
        else f"the output of layer {reading.layer}"
    )
    return layer + ("", " after the last norm", " after the last norm, twice")[reading.norms]


def _unknown(slot: Slot) -> Fault:
    return Fault(
        "unknown",
        f"{slot.name} is no state of this verifier that was looked for; nearest is "
        f"{named(slot.found)}, with a relative error of {slot.error:.2g} where "
        f"{slot.tolerance:.2g} would do: another verifier, other weights or another precision?",
    )


def _row_faults(documents: Sequence[Measured], slots: Sequence[Slot]) -> list[Fault]:
    known = [slot for slot in slots if slot.known]
    by_offsets: dict[tuple[int, ...], list[Slot]] = {}
    for slot in known:
        by_offsets.setdefault(slot.offsets, []).append(slot)
    faults = []
    for offsets, group in by_offsets.items():
        who = "" if len(group) == len(slots) else f"of {', '.join(s.name for s in group)} "
        moved = sum(offset != 0 for offset in offsets)
        short = [item.tokens - item.rows for item in documents]
        among = f"in {moved} of {len(offsets)} documents"
        if moved and all(o == s for o, s in zip(offsets, short, strict=True)):
            first = _how_many(sorted({o for o in offsets if o}), "the first row", "the first")
            faults.append(
                Fault(
                    "rows_missing",
                    f"{first} {who}missing {among}: a prefix cache or chunked prefill was on",
                )
            )
        elif moved and len({o for o in offsets if o}) == 1 and not any(short):
            by = next(o for o in offsets if o)
            cause = ": the first rows are missing (prefix cache), or rows were shifted when stored"
            faults.append(
                Fault(
                    "rows_shifted",
                    f"row t {who}holds the state of token t {'+' if by > 0 else '-'} {abs(by)} "
                    f"{among}{cause if by > 0 else ': rows were shifted when stored'}",
                )
            )
        elif moved:
            spread = f"{min(offsets)} to {max(offsets)}"
            faults.append(
                Fault(
                    "rows_out_of_step",
                    f"rows {who}do not stand at their tokens {among} (shifted by {spread}): parts "
                    "are missing: a prefix cache or chunked prefill was on",
                )
            )
        elif any(short):
            faults.append(
                Fault(
                    "rows_missing",
                    f"the last rows {who}are missing in {sum(s > 0 for s in short)} of "
                    f"{len(offsets)} documents",
                )
            )
    return faults


def _how_many(counts: Sequence[int], one: str, several: str) -> str:
    if list(counts) == [1]:
        return f"{one} is"
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{several} {span} rows are"


def _wrong_rows(documents: Sequence[Measured], slots: Sequence[Slot]) -> list[Fault]:
    """Rows that differ although the rest of their tensor is as declared."""
    faults = []
    for s, slot in enumerate(slots):
        if not slot.known:
            continue
        start = [item.first_wrong[s] for item in documents if item.first_wrong[s]]
        inside = [item.id for item in documents if item.wrong_share[s] > OUT_OF_STEP]
        if 2 * len(start) > len(documents):
            rows = _how_many(sorted(set(start)), "the first row", "the first")
            faults.append(
                Fault(
                    "rows_missing",
                    f"{rows} missing in {slot.name} of {len(start)} of {len(documents)} documents: "
                    "something else stands there; a prefix cache was on",
                )
            )
        elif inside:
            faults.append(
                Fault(
                    "rows_wrong",
                    f"{slot.name} holds other states in more than {OUT_OF_STEP:.0%} of the rows of "
                    f"{len(inside)} of {len(documents)} documents, sample {inside[0]} among them",
                )
            )
    return faults


def _layer_faults(known: Sequence[Slot], declared: Declared) -> list[Fault]:
    """Order, a common offset, single layers: the explanation with the fewest faults."""
    got = {slot.name: slot.found.layer for slot in known}
    names, layers = declared.names[:-1], declared.aux_layers
    if all(got.get(name, layer) == layer for name, layer in zip(names, layers, strict=True)):
        return []
    count = len(layers)
    orders = (
        list(permutations(range(count)))
        if count < MANY_LAYERS
        else [tuple(range(count)), tuple(reversed(range(count)))]
    )
    plans = []
    for order in orders:
        for delta in (0, 1, -1):
            wrong = [
                (name, layers[order[i]] + delta)
                for i, name in enumerate(names)
                if name in got and got[name] != layers[order[i]] + delta
            ]
            cost = len(wrong) + 1.5 * (order != tuple(range(count))) + 1.1 * (delta != 0)
            plans.append((cost, order, delta, wrong))
    _, order, delta, wrong = min(plans, key=lambda plan: plan[0])
    faults = []
    told = ", ".join(f"{name} is {named(Reading(layer))}" for name, layer in got.items())
    serving = f"serving will use {', '.join(map(str, layers))}"
    if delta:
        way = (
            "every aux layer is one too high: ids were counted as post-layer indices and then "
            "raised again"
            if delta > 0
            else "every aux layer is one too low: inputs of layers were captured, or transformers' "
            "hidden_states counted as outputs"
        )
        faults.append(Fault("layer_offset", f"{way} ({told}; {serving})"))
    if order != tuple(range(count)):
        faults.append(
            Fault(
                "aux_order",
                "the aux layers stand in another order: "
                + ", ".join(f"{name} holds layer {layer}" for name, layer in got.items())
                + f"; {serving} in this order",
            )
        )
    for name, expected in wrong:
        own = layers[names.index(name)] if not delta and order == tuple(range(count)) else expected
        faults.append(
            Fault(
                "aux_layer",
                f"{name} is {named(Reading(got[name]))}; serving will use layer {own}",
            )
        )
    return faults


def _final_faults(final: Slot, declared: Declared) -> list[Fault]:
    faults = []
    last = declared.num_hidden_layers - 1
    if final.found.layer != last:
        faults.append(
            Fault("final_layer", f"final is {named(final.found)}, not of the last one, {last}")
        )
    if final.found.norms != final.declared.norms:
        said = declared.final_hidden.replace("_", "-")
        if final.found.norms == 2:
            text = f"final went through the last norm twice, declared {said}"
        else:
            text = f"final is {('pre', 'post')[final.found.norms]}-norm, declared {said}"
        faults.append(Fault("final_norm", text))
    return faults


def _times(slot: Slot) -> str:
    return "" if slot.found.norms == 1 else ", twice"
