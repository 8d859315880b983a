"""The verifier: what its configuration says, and its weights by role.

The one place that a verifier is asked about: everything else takes a `VerifierSpec` or what
`eagle3.verifier_head` and `eagle3.verifier_model` make of it. Knows nothing of drafters or of data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from eagle3.dequantise import dequantise
from eagle3.errors import HarnessError
from eagle3.pickles import PickledTensors
from eagle3.reading import open_tensors, read_index, read_object
from eagle3.settings import Settings, read_settings
from eagle3.verifier_config import flat_config, has_latent_attention, is_tied, quantisation
from eagle3.verifier_files import (
    INDICES,
    SINGLE,
    WHOLE_FOLDER,
    find_file,
    optional_file,
    revision_of,
)
from eagle3.weight_keys import WeightKeys, find_keys, stored_parts


class HeadConfig(Settings):
    """What training has to know of a verifier, flat, whatever its own configuration looks like.

    `norm_offset` is added to norm weights (1.0 for Gemma), `embed_scale` multiplies embedding
    rows, `logit_scale` multiplies logits, `logit_softcap` c (if any) turns them into
    c·tanh(logits/c).
    """

    verifier: str
    config_hash: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    norm_offset: float
    embed_scale: float
    logit_scale: float
    logit_softcap: float | None


class VerifierSpec(HeadConfig):
    """A verifier that can be opened.

    Attributes:
        source: folder or hub id, as `from_pretrained` takes it.
        tied: what the configuration says of tied embeddings, if anything.
        latent_attention: whether it keeps keys and values as latent vectors (MLA).
        quantisation: `quantization_config` of the checkpoint, {} where it has none.
        trust_remote_code: whether code out of the verifier's own folder may run.
    """

    source: str
    tied: bool | None
    latent_attention: bool
    quantisation: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = False

    @classmethod
    def open(cls, source: str | Path, *, trust_remote_code: bool = False) -> VerifierSpec:
        """Reads a verifier's configuration from a Hugging Face folder or hub id.

        Args:
            trust_remote_code: run the code that comes with the verifier, where its model or
                tokenizer needs it.

        Raises:
            HarnessError: nothing there, no config.json in it, or a key missing from it.
        """
        source = str(source)
        path = find_file(source, "config.json")
        config = read_object(path, fix=WHOLE_FOLDER)
        generation_path = optional_file(source, "generation_config.json")
        generation = read_object(generation_path, fix=WHOLE_FOLDER) if generation_path else {}
        fields = flat_config(config, generation, where=path)
        fields["verifier"] = config.get("_name_or_path") or Path(source).name
        if not Path(source).is_dir():
            fields["verifier"] = source
        fields |= {
            "source": source,
            "tied": is_tied(config),
            "latent_attention": has_latent_attention(config),
            "quantisation": dict(quantisation(config)),
            "trust_remote_code": trust_remote_code,
        }
        return read_settings(cls, fields, where=str(path))

    @property
    def head_config(self) -> HeadConfig:
        """The fields that travel with a head file."""
        return HeadConfig(**{name: getattr(self, name) for name in HeadConfig.model_fields})

    @cached_property
    def revision(self) -> str:
        """The hub's commit, or for a folder a fingerprint of its weight files, read when asked."""
        return revision_of(self.source, find_file(self.source, "config.json"))

    @cached_property
    def weight_files(self) -> dict[str, str]:
        """Stored tensor name -> file name, from the index or the single file.

        Raises:
            HarnessError: there are no weights, or their index or the file is broken.
        """
        for index in INDICES:
            if (path := optional_file(self.source, index)) is not None:
                return read_index(path, fix=WHOLE_FOLDER)
        for name in SINGLE:
            if (path := optional_file(self.source, name)) is not None:
                with _opened(path) as file:
                    return dict.fromkeys(file.keys(), name)
        raise HarnessError(
            "the verifier has no weights that are read here",
            where=self.source,
            rule=f"safetensors, or pytorch_model.bin: {' or '.join((*INDICES, *SINGLE))}",
            got="none of them",
            fix="save it with save_pretrained, or give another folder or hub id",
        )

    @cached_property
    def keys(self) -> WeightKeys:
        """Stored names by role."""
        return find_keys(
            self.weight_files, self.num_hidden_layers, tied=self.tied, where=self.source
        )

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Opens the named weights, memory-mapped; shards that hold none of them stay closed.

        Args:
            names: of weights. A quantised one is put together from its parts, in bfloat16.

        Raises:
            HarnessError: a weight is quantised in a way that is not understood.
        """
        parts = {name: stored_parts(self.weight_files, name) for name in names}
        wanted = {stored for own in parts.values() for stored in own.values()}
        found: dict[str, Tensor] = {}
        for file_name in sorted({self.weight_files[stored] for stored in wanted}):
            with _opened(find_file(self.source, file_name)) as file:
                here = {name for name in wanted if self.weight_files[name] == file_name}
                if absent := sorted(here - set(file.keys())):
                    raise HarnessError(
                        "the index of the verifier's weights names a file that lacks them",
                        where=f"{self.source}: {file_name}",
                        rule=f"tensor {absent[0]}",
                        got=f"{len(here & set(file.keys()))} of the {len(here)} looked for there",
                        fix=WHOLE_FOLDER,
                    )
                found |= {stored: file.get_tensor(stored) for stored in sorted(here)}
        return {
            name: dequantise(
                name,
                {part: found[stored] for part, stored in own.items()},
                self.quantisation,
                where=self.source,
            )
            for name, own in parts.items()
        }


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of weights by its kind; both answer to `keys` and `get_tensor`."""
    if path.suffix == ".safetensors":
        with open_tensors(path, fix=WHOLE_FOLDER) as file:
            yield file
    else:
        yield PickledTensors(path)
