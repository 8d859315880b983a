"""A verifier as a loaded model and tokenizer of transformers.

Knows how transformers is asked; what a verifier is stands in `eagle3.verifier`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from eagle3.verifier_files import WHOLE_FOLDER


def load_model(spec: VerifierSpec, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """The verifier as a Hugging Face causal LM in eval mode, gradients off.

    Raises:
        HarnessError: its model is code of its own that may not run, or a package that its
            quantisation needs is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    trusted = {"trust_remote_code": spec.trust_remote_code}
    with _own_code_named(spec, "model"):
        config = AutoConfig.from_pretrained(spec.source, **trusted)
        own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
        causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or (own and spec.trust_remote_code)
        auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        try:
            # Attention is transformers' choice: some verifiers (gpt-oss, Gemma 2) have no SDPA.
            model: nn.Module = auto.from_pretrained(spec.source, dtype=dtype, **trusted)
        except ImportError as error:
            raise HarnessError(
                "loading the verifier needs a package that is not installed",
                where=spec.source,
                rule="all packages that its code imports",
                got=str(error).strip().split("\n")[0],
                fix="install it, or extract with a serving engine",
            ) from None
    return model.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def _own_code_named(spec: VerifierSpec, part: str) -> Iterator[None]:
    """Turns transformers' refusal to run a verifier's own code into ours, with the key to set."""
    try:
        yield
    except (ValueError, AttributeError) as error:
        # transformers may stumble over something else on its way from the refusal.
        if not any("trust_remote_code" in str(one) for one in (error, error.__context__)):
            raise
        raise HarnessError(
            f"the verifier's {part} is code that comes with it, which is not run unasked",
            where=spec.source,
            rule="run.trust_remote_code: true in params.yaml runs it",
            fix="read the .py files in its folder, then set the key",
        ) from None


def decoder_of(model: Any) -> Any:
    """The text decoder inside a loaded verifier: has `embed_tokens`, `layers` and `norm`."""
    decoder = model.get_decoder()
    # Vision-language models answer with the whole multimodal body.
    inner = getattr(decoder, "language_model", None)
    return decoder if inner is None else inner


def cache_argument(model: Any) -> str:
    """The name by which a model's `forward` takes its cache of keys and values: renamed within the
    range of releases that the project allows."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def load_tokenizer(spec: VerifierSpec) -> Any:
    """The verifier's tokenizer with its chat template.

    Raises:
        HarnessError: it cannot be loaded, or has no chat template.
    """
    from transformers import AutoTokenizer

    try:
        with _own_code_named(spec, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                spec.source, trust_remote_code=spec.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise HarnessError(
            "the verifier's tokenizer cannot be loaded",
            where=spec.source,
            rule="tokenizer.json beside the weights",
            got=str(error).strip().split("\n")[0],
            fix=WHOLE_FOLDER,
        ) from None
    if not tokenizer.chat_template:
        raise HarnessError(
            "the verifier's tokenizer has no chat template",
            where=spec.source,
            rule="chat_template.jinja beside the tokenizer, or chat_template in its config",
            fix="use an instruction-tuned verifier",
        )
    return tokenizer
