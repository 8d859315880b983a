"""What writing a head takes in memory, on a checkpoint many times the head's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

MIB = 1 << 20
# Pages of mapped files count as resident too: all that is touched is in this number.
MEASURED = """
import resource, sys
from pathlib import Path
from eagle3.verifier import VerifierSpec
from eagle3.verifier_head import write_head
spec = VerifierSpec.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_head(spec, Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_head_takes_no_more_memory_than_its_own_tensors(
    tmp_path: Path, project_root: Path
) -> None:
    folder, rows, hidden = tmp_path / "m", 16384, 512
    folder.mkdir()
    sizes = {"hidden_size": hidden, "vocab_size": rows, "intermediate_size": hidden}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 128}
    config = {"model_type": "llama", "max_position_embeddings": 64, **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    head = {
        "model.embed_tokens.weight": torch.ones(rows, hidden, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": torch.ones(rows, hidden, dtype=torch.bfloat16),
    }
    save_file(head, folder / "head.safetensors")
    places = dict.fromkeys(head, "head.safetensors")
    for shard in range(3):
        name = f"model.layers.{shard}.experts.weight"
        save_file({name: torch.ones(50 * MIB, dtype=torch.bfloat16)}, folder / f"{shard}.st")
        places[name] = f"{shard}.st"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", MEASURED, str(folder), str(out)]
    done = subprocess.run(command, cwd=project_root, capture_output=True, text=True, check=True)
    taken = int(done.stdout.split()[-1])
    size = sum(tensor.nbytes for tensor in head.values())
    assert out.stat().st_size < size + MIB
    assert taken < size + 16 * MIB, f"{taken / MIB:.0f} MiB for a head of {size / MIB:.0f} MiB"
