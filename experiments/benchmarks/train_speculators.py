"""A task of the training benchmark by the PyPI package `speculators`, in rounds.

`.venv-speculators/bin/python -m experiments.benchmarks.train_speculators FOLDER OUT`, in that
package's environment. Its own trainer, data loader, model (sdpa), loss (eager: the fused one needs
a GPU) and AdamW, bfloat16 autocast over float32 weights as it trains everywhere. It knows
accelerators only; told here that its device is the CPU: where it moves things to, autocast's
device, and the waiting of its step timer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from experiments.benchmarks.rounds import Turns
from experiments.benchmarks.speculators_model import build, package_name, require_version


def main(folder: Path, out: Path) -> None:
    turns = Turns()
    require_version()
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train import trainer as package
    from speculators.train.data import BaseDataset, CollateFn

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    task: dict[str, Any] = json.loads((folder / "task.json").read_text())
    init = load_file(folder / "init.safetensors")
    rows = load_file(folder / "rows.safetensors")
    lengths = rows["lengths"].tolist()
    parts = {name: rows[name].split(lengths) for name in ("token_ids", "loss_mask", "aux", "final")}

    class States(BaseDataset):
        def _compute_approx_lengths(self) -> list[int]:
            return lengths

        def _get_raw_data(self, index: int) -> dict[str, torch.Tensor]:
            return {
                "input_ids": parts["token_ids"][index].long(),
                "hidden_states": parts["aux"][index].flatten(1),
                "verifier_last_hidden_states": parts["final"][index],
                "loss_mask": parts["loss_mask"][index].bool(),
            }

    settings, length = task["settings"], task["length"]
    prefix = "drafter."
    weights = {n.removeprefix(prefix): v for n, v in init.items() if n.startswith(prefix)}
    model = build(
        task["config"],
        weights,
        embed_VH=init["embed"],
        target_rows_DG=init["target_rows"],
        target_norm_G=init.get("norm"),
        ttt_steps=settings["objective"]["ttt_steps"],
    )
    loader: DataLoader[Any] = DataLoader(
        States(length),
        batch_sampler=task["batches"],
        collate_fn=CollateFn(length, task["config"]["target_hidden_size"], preprocess=shift_batch),
    )
    package.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None
    with tempfile.TemporaryDirectory() as save_path:
        trainer = package.Trainer(
            model,
            package.TrainerConfig(
                lr=settings["lr"],
                num_epochs=1,
                save_path=save_path,
                weight_decay=settings["weight_decay"],
                scheduler_type="none",
                log_freq=task["round_steps"],
                train_call_kwargs={
                    "ttt_steps": settings["objective"]["ttt_steps"],
                    "ttt_step_loss_decay": settings["objective"]["step_decay"],
                    "loss_config": resolve_loss_config("kl_div", "eager"),
                },
            ),
            loader,
        )
        trainer.device_type = "cpu"

        def after_step() -> None:
            if trainer.global_step % task["round_steps"] == 0:
                turns.end()
                turns.begin()

        turns.begin()
        trainer.train_epoch(0, step_callback=after_step)
    found = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_file({n: found[package_name(n)] for n in weights if package_name(n) in found}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
