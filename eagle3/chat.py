"""Messages to token ids, through the verifier's own chat template.

Token ids made here are the truth from then on: nothing later tokenises again. Knows nothing of
where messages come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3.errors import HarnessError

Message = Mapping[str, str]
# Stands where a user would begin to write; no template or tokenizer gives it a meaning.
MARK = "\u241fuser text\u241f"


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer."""
    return _encode(tokenizer, messages, generation_prompt=True)


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], eos_token_ids: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a conversation with its answers, and which of them are supervised.

    An assistant turn is supervised from the first token after its generation prompt to its
    end-of-sequence token, included. A turn that the template rewrites when more turns follow
    (reasoning models drop earlier thoughts) is context only: served models never produced it so.

    Returns:
        ids, and half-open runs [start, end) of supervised tokens.

    Raises:
        HarnessError: the last turn is not the assistant's, or the template does not put it where
            generation would begin.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise HarnessError(
            "a conversation does not end with an answer",
            rule="the last message has role assistant",
            got=messages[-1]["role"] if messages else "no messages",
        )
    token_ids = _encode(tokenizer, messages, generation_prompt=False)
    runs = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _encode(tokenizer, messages[:turn], generation_prompt=True)
        after = _encode(tokenizer, messages[: turn + 1], generation_prompt=False)
        if token_ids[: len(before)] == before and token_ids[: len(after)] == after:
            start, end = len(before), len(after)
            stops = [i for i in range(start, end) if token_ids[i] in eos_token_ids]
            runs.append((start, stops[0] + 1 if stops else end))
        elif turn == len(messages) - 1:
            raise HarnessError(
                "the chat template does not put an answer where generation would begin",
                rule="rendering with the answer begins with the generation prompt",
                fix="regenerate the answers instead of using the given ones",
            )
    return token_ids, runs


def user_opening(tokenizer: Any, system: str | None) -> tuple[str, str]:
    """The template's text before and after a user's first words.

    Args:
        system: a system prompt, or None for the template's default.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": MARK})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    before, found, after = text.partition(MARK)
    if not found:
        raise HarnessError(
            "the chat template changes a user's text",
            rule="the user's message stands in the rendering as it is",
            fix="give prompts in a file instead of having the verifier write them",
        )
    return before, after


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode(tokenizer: Any, messages: Sequence[Message], *, generation_prompt: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=generation_prompt,
            tokenize=True,
            return_dict=False,
        )
    )
