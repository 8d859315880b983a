"""What a run is, in two or three plain sentences: its description on MLflow's page (Markdown).

Knows nothing of who computes what is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.tracking import Tracker
    from eagle3.trainer import TrainResult

TAG = "mlflow.note.content"


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training, as it is before its first step.

    init: the checkpoint that it starts from; None: from scratch.
    budget: in words.
    """

    name: str
    init: Path | None
    verifier: str
    states: Path
    documents: int
    budget: str
    lr: float
    ttt_steps: int

    def begun(self) -> str:
        """What is trained on what."""
        start = "from scratch" if self.init is None else f"finetuned from `{self.init}`"
        return (
            f"Drafter **{self.name}**, {start}, on {self.documents:,} answers of {self.verifier} "
            f"(states in `{self.states}`): {self.budget}, {self.ttt_steps} TTT steps, learning "
            f"rate {self.lr:g}."
        )

    def ended(
        self,
        *,
        tokens: int,
        steps: int,
        best_step: int,
        best_tau: float | None,
        outputs: Mapping[str, Path],
    ) -> str:
        """The same, what came of it, and where that is.

        Args:
            best_tau: on dev answers; None without any.
            outputs: by what they are.
        """
        found = f"After {tokens:,} tokens in {steps:,} steps "
        found += (
            "there were no dev answers to measure it on"
            if best_tau is None
            else f"the weights kept are those of step {best_step:,}: **dev τ {best_tau:.3f}**"
        )
        return f"{self.begun()}\n\n{found}. {places(outputs)}"

    def tell_begin(self, tracker: Tracker) -> None:
        """Makes `begun` the run's description."""
        tracker.log_tags({TAG: self.begun()})

    def tell_end(self, tracker: Tracker, result: TrainResult, outputs: Mapping[str, Path]) -> None:
        """Makes `ended` the run's description, with the best step and its dev τ as metrics."""
        best = {"best_step": result.best_step, "best_dev_tau": result.best_tau or 0.0}
        tracker.log_metrics(best, result.steps)
        said = self.ended(
            tokens=result.tokens,
            steps=result.steps,
            best_step=result.best_step,
            best_tau=result.best_tau,
            outputs=outputs,
        )
        tracker.log_tags({TAG: said})


def budget(tokens: int | None, epochs: int | None) -> str:
    """Of a training: one of the two, in words."""
    if tokens is not None:
        return f"{tokens:,} training tokens"
    return "one pass" if epochs == 1 else f"{epochs} passes"


def evaluation(
    name: str,
    *,
    checkpoint: Path,
    verifier: str,
    overall: Mapping[str, Any],
    benchmarks: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, Any],
    exactness: Mapping[str, Any],
    outputs: Mapping[str, Path],
) -> str:
    """What a drafter was tested on, how it did, whether that pays, and where the results are.

    Args:
        overall: of all prompts together; `benchmarks`: the same of each.
        timing: `speedup`, `break_even_tau` and how it was decoded.
        exactness: counts of texts, and of those that plain decoding gave too.
    """
    each = ", ".join(f"{name} {group['tau']:.3f}" for name, group in benchmarks.items())
    pays = "faster" if timing["speedup"] > 1.0 else "**no faster**"
    return (
        f"Drafter **{name}** (`{checkpoint}`) on {overall['prompts']:,} test prompts answered by "
        f"{verifier}, {timing['k']} drafts a step: **τ {overall['tau']:.3f}**"
        f"{f' ({each})' if len(benchmarks) > 1 else ''}.\n\n"
        f"Decoding {timing['prompts']} of them in {timing['dtype']} on {timing['device']} runs at "
        f"{timing['speedup']:.2f} times the speed of plain decoding, {pays} than without drafts; "
        f"break-even is τ {timing['break_even_tau']:.2f}. In float32 {exactness['equal']} of "
        f"{exactness['prompts']} texts are plain decoding's, token for token.\n\n{places(outputs)}"
    )


def places(outputs: Mapping[str, Path]) -> str:
    """Where something is, by what it is: a sentence."""
    said = _listed([f"{what} in `{path}`" for what, path in outputs.items()])
    return f"{said[:1].upper()}{said[1:]}."


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
