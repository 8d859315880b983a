"""Chat templates: token ids, supervised runs, the opening of a user turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.chat import encode_conversation, encode_prompt, encode_text, user_opening
from eagle3.errors import HarnessError
from eagle3.verifier import VerifierSpec
from eagle3.verifier_model import load_tokenizer

# As SmolLM2's: a system prompt of its own where none is given.
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As reasoning models': thoughts of earlier turns are dropped.
FORGETS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_verifier: Path) -> Any:
    return load_tokenizer(VerifierSpec.open(tiny_verifier))


def _turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    tokenizer.chat_template = DEFAULT_SYSTEM
    ids = encode_prompt(tokenizer, _turns("How many days?"))
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n"
        "<|im_start|>user\nHow many days?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_every_answer_is_supervised_with_its_end(tokenizer: Any) -> None:
    messages = _turns("One?", "Yes, one.", "Two?", "Two, too.")
    ids, runs = encode_conversation(tokenizer, messages, [2])
    assert [tokenizer.decode(ids[a:b]) for a, b in runs] == [
        "Yes, one.<|im_end|>",
        "Two, too.<|im_end|>",
    ]
    assert ids[: runs[0][0]] == encode_prompt(tokenizer, messages[:1])
    assert ids[: runs[1][0]] == encode_prompt(tokenizer, messages[:3])


def test_an_answer_that_the_template_rewrites_is_context_only(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETS
    messages = _turns("One?", "hmm</think>Yes.", "Two?", "well</think>No.")
    ids, runs = encode_conversation(tokenizer, messages, [2])
    assert "hmm" not in tokenizer.decode(ids)
    assert [tokenizer.decode(ids[a:b]) for a, b in runs] == ["well</think>No.<|im_end|>"]


def test_a_conversation_without_answer_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(HarnessError, match="does not end with an answer"):
        encode_conversation(tokenizer, _turns("One?"), [2])


def test_opening_of_a_user_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = DEFAULT_SYSTEM
    before, after = user_opening(tokenizer, None)
    assert before == "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n"
    assert after.startswith("<|im_end|>")
    before, _ = user_opening(tokenizer, "You teach.")
    assert before == "<|im_start|>system\nYou teach.<|im_end|>\n<|im_start|>user\n"
    # Opening and first words tokenise as the whole prompt does.
    whole = encode_prompt(tokenizer, _turns("What is a list?"))
    opening = encode_text(tokenizer, user_opening(tokenizer, None)[0])
    assert whole[: len(opening)] == opening
