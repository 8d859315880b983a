"""Messages to token ids, through the verifier's own chat template.

Token ids made here are the truth from then on: nothing later tokenises again. Knows nothing of
where messages come from.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.errors import HarnessError

Message = Mapping[str, Any]
# Stands where a user would begin to write; no template or tokenizer gives it a meaning.
MARK = "\u241fuser text\u241f"
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Sample:
    """Token ids as a served verifier reads and writes them.

    Attributes:
        runs: half-open runs [start, end) of supervised tokens, ascending.
    """

    token_ids: list[int]
    runs: list[tuple[int, int]]


def encode_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer."""
    return _encode(tokenizer, messages, tools, generation_prompt=True)


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    eos_token_ids: Sequence[int],
    tools: Sequence[Any] | None = None,
    *,
    where: str = "conversation",
) -> list[Sample]:
    """A conversation with its answers as samples: what each answer was given when it was served.

    Every assistant turn is rendered twice: as the prompt that a server would make of the turns
    before it, and with its answer. It is supervised from the first token after the prompt to its
    end-of-sequence token, included; what the template puts after that is left out of the last turn.
    Turns share a sample as long as each prompt begins with all that was supervised before. A
    template that rewrites earlier turns (reasoning models drop earlier thoughts) starts a new
    sample there, in which the rewritten turns are context only: so they are when serving.

    Args:
        messages: OpenAI form; whatever the template reads besides `role` and `content`
            (`tool_calls`, `reasoning_content`) is handed to it.
        tools: as the template takes them.
        where: what errors call the conversation.

    Returns:
        One sample, or more for a template that rewrites, in the order of their last turns.

    Raises:
        HarnessError: the last turn is not the assistant's; or the template does not put an answer
            where generation would begin, drops its thought, alters its text, or ends it without a
            token that ends generation.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise HarnessError(
            "a conversation does not end with an answer",
            where=where,
            rule="the last message has role assistant",
            got=messages[-1]["role"] if messages else "no messages",
            fix="take out what follows its last answer, or let the verifier answer "
            "(regenerate.keep_given: false)",
        )
    samples: list[Sample] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encode_prompt(tokenizer, messages[:turn], tools)
        whole = _encode(tokenizer, messages[: turn + 1], tools, generation_prompt=False)
        place = f"{where}, message {turn}"
        end = _answer_end(tokenizer, prompt, whole, eos_token_ids, place)
        answer = whole[len(prompt) : end]
        _check_thought(tokenizer, message, answer, place)
        _check_text(tokenizer, message, answer, place)
        run = (len(prompt), end)
        if samples and prompt[: len(samples[-1].token_ids)] == samples[-1].token_ids:
            samples[-1] = Sample(whole[:end], [*samples[-1].runs, run])
        else:
            samples.append(Sample(whole[:end], [run]))
    return samples


def _answer_end(
    tokenizer: Any,
    prompt: Sequence[int],
    whole: Sequence[int],
    eos_token_ids: Sequence[int],
    where: str,
) -> int:
    """Index after an answer's end-of-sequence token."""
    if whole[: len(prompt)] != prompt:
        same = next(
            (i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b),
            min(len(prompt), len(whole)),
        )
        raise HarnessError(
            "the chat template does not put an answer where generation would begin",
            where=f"{where}, token {same}",
            rule=f"rendering with the answer begins as the prompt does, here with "
            f"{tokenizer.decode(prompt[same:])!r}",
            got=repr(tokenizer.decode(whole[same : same + 16])),
            fix="regenerate the answers instead of using the given ones",
        )
    stops = [i for i in range(len(prompt), len(whole)) if whole[i] in eos_token_ids]
    if not stops:
        raise HarnessError(
            "the chat template ends an answer without a token that ends generation",
            where=where,
            rule=f"one of {tokenizer.convert_ids_to_tokens(list(eos_token_ids))}",
            got=repr(tokenizer.decode(whole[-4:])),
            fix="name the template's end-of-turn token in eos_token_id of generation_config.json",
        )
    return stops[0] + 1


def _check_thought(tokenizer: Any, message: Message, answer: Sequence[int], where: str) -> None:
    """Refuses a template that drops the thought of the very answer that is supervised."""
    inline = THOUGHT.search(message.get("content") or "")
    thought = message.get("reasoning_content") or (inline[1] if inline else "")
    if thought.strip() and thought.strip() not in tokenizer.decode(answer):
        raise HarnessError(
            "the chat template drops an answer's own thought, which a served verifier writes",
            where=where,
            rule=f"the rendering of the last turn holds {thought.strip()[:60]!r}",
            got=repr(tokenizer.decode(answer)[:60]),
            fix="regenerate the answers instead of using the given ones",
        )


def _check_text(tokenizer: Any, message: Message, answer: Sequence[int], where: str) -> None:
    """Refuses a template that alters the text of the very answer that is supervised.

    An answer is supervised as a server would have generated it: its own text, then the end. A
    template that changes letters or inner whitespace, or an answer that holds an end of generation
    itself, makes rows of text that no verifier wrote, each in its right place and none marked.
    Whitespace around the text is left to the template (Llama 3 and Gemma trim it): what is learnt
    at the rows that remain is the verifier's own distribution there, and later turns are served
    with the trimmed text. A thought that stands in the content may move (Qwen3 sets it apart in
    lines of its own); `_check_thought` looks for it, here what follows it has to stand. What the
    template adds around both, an empty thought say, is its own way to open or close an answer.
    """
    text = (message.get("content") or "").rpartition("</think>")[2].strip()
    # There and back: a tokenizer that does not keep every character is no template's doing.
    kept = tokenizer.decode(encode_text(tokenizer, text)).strip()
    rendered = tokenizer.decode(answer)
    if kept in rendered:
        return
    same = bisect_left(range(1, len(kept) + 1), True, key=lambda n: kept[:n] not in rendered)
    at = rendered.find(kept[:same]) + same
    raise HarnessError(
        "the chat template alters the text of an answer, or an end of generation is in it",
        where=f"{where}, character {same} of its text",
        rule=f"the rendering goes on with {kept[same : same + 40]!r}",
        got=repr(rendered[at : at + 40]),
        fix="correct or leave out the conversation, or regenerate the answers instead of using the "
        "given ones (regenerate.keep_given: false)",
    )


def generation_opening(tokenizer: Any) -> list[int]:
    """The token ids that the template adds where the assistant begins to answer."""
    messages = [{"role": "user", "content": MARK}]
    plain = _encode(tokenizer, messages, None, generation_prompt=False)
    prompt = encode_prompt(tokenizer, messages)
    return prompt[len(plain) :] if prompt[: len(plain)] == plain else []


def user_opening(tokenizer: Any, system: str | None) -> tuple[str, str]:
    """The template's text before and after a user's first words.

    Args:
        system: a system prompt, or None for the template's default.

    Raises:
        HarnessError: the text does not come out as it went in, or nothing comes out.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": MARK})
    with _refusals_named(messages):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    before, found, after = text.partition(MARK)
    if not found:
        raise HarnessError(
            "the chat template changes a user's text",
            where="the tokenizer's chat template",
            rule="the user's message stands in the rendering as it is",
            got=repr(text[:80]),
            fix="a template that does; it is beside the verifier's tokenizer",
        )
    return before, after


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    generation_prompt: bool,
) -> list[int]:
    with _refusals_named(messages):
        return list(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools and list(tools),
                add_generation_prompt=generation_prompt,
                tokenize=True,
                return_dict=False,
            )
        )


@contextlib.contextmanager
def _refusals_named(messages: Sequence[Message]) -> Iterator[None]:
    """Templates raise errors for what they do not render: an order of roles, parts of content."""
    from jinja2 import TemplateError

    try:
        yield
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:
        roles = [str(message.get("role")) for message in messages]
        first = next((str(m.get("content")) for m in messages), "")
        raise HarnessError(
            "the chat template does not render a conversation",
            where=f"one of roles {', '.join(roles[:8]) or '(none)'} that begins {first[:60]!r}",
            rule="messages of roles and contents that the verifier's template knows",
            got=f"{type(error).__name__}: {error}",
            fix="correct the conversation or leave it out; the template is beside the tokenizer",
        ) from None
