"""What updates a drafter's weights: AdamW, or Muon for the layer's matrices and AdamW for the rest.

Both are torch's. Muon (https://kellerjordan.github.io/posts/muon/) makes a matrix's momentum
orthogonal before it is added; scaled as in https://arxiv.org/abs/2502.16982, sec. 2.2, its steps
have AdamW's size, so that one learning rate serves both. Norms and a trained head stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from eagle3.parallel import like, whole

OptimizerName = Literal["adamw", "muon"]
Trained = Mapping[str, torch.nn.Parameter]
_HEAD = "lm_head.weight"


class Optimizer:
    """Updates parameters from their gradients; its moments go by the parameters' names."""

    def __init__(
        self, name: OptimizerName, trained: Trained, *, beta2: float, weight_decay: float
    ) -> None:
        matrices = {n for n, p in trained.items() if p.ndim == 2 and n != _HEAD}
        by_muon = matrices if name == "muon" else set()
        self._trained = trained
        self._parts: list[tuple[torch.optim.Optimizer, list[str]]] = []
        names = [n for n in trained if n in by_muon]
        if names:
            muon = torch.optim.Muon(
                [trained[n] for n in names],
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append((muon, names))
        names = [n for n in trained if n not in by_muon]
        if names:
            adamw = torch.optim.AdamW(
                [trained[n] for n in names],
                betas=(0.9, beta2),
                weight_decay=weight_decay,
                fused=True,
            )
            self._parts.append((adamw, names))

    def step(self, rate: float) -> None:
        """One update at a learning rate; gradients are used up."""
        for part, _ in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """All that the next update depends on besides weights and gradients, whole on every rank:
        moments and step counts, by parameter name and their own."""
        return {
            f"{names[index]}.{key}": whole(value)
            for part, names in self._parts
            for index, values in part.state_dict()["state"].items()
            for key, value in values.items()
        }

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """Puts moments back, sharded as the parameters are."""
        for part, names in self._parts:
            state: dict[int, dict[str, Tensor]] = {}
            for index, name in enumerate(names):
                parameter = self._trained[name]
                state[index] = {
                    key.removeprefix(f"{name}."): like(value.clone(), parameter)
                    if value.dim()
                    else value
                    for key, value in moments.items()
                    if key.startswith(f"{name}.")
                }
            groups = part.state_dict()["param_groups"]
            part.load_state_dict({"state": state, "param_groups": groups})
