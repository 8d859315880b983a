"""Chat templates: token ids, supervised runs, the opening of a user turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.chat import (
    Sample,
    encode_conversation,
    encode_prompt,
    encode_text,
    generation_opening,
    user_opening,
)
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
# As Kimi's: one token for each role, thoughts of earlier turns emptied, generation within one.
KIMI = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}"
    "{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|><think>' }}"
    "{% if loop.last %}{{ message.get('reasoning_content', '') }}{% endif %}{{ '</think>' }}"
    "{% else %}{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}"
    "{% endif %}{{ message['content'] or '' }}{% for call in message.get('tool_calls') or [] %}"
    "{{ '<|tool_call|>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|><think>' }}{% endif %}"
)
# As Qwen3's: thoughts are kept from the last user's question on, through tool calls.
QWEN3 = (
    "{% set ns = namespace(query=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% if loop.index0 > ns.query %}"
    "{{ '<think>\\n' + m.get('reasoning_content', '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}{{ m['content'] }}{% for call in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As DeepSeek-R1's: generation begins within a thought that renderings never hold.
R1 = (
    "{% for m in messages %}{{ '<|im_' + m['role'] + '|>' }}"
    "{{ m['content'].split('</think>')[-1] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|><think>\\n' }}{% endif %}"
)
# Ends the last answer otherwise than earlier ones, as gpt-oss' does.
TWO_ENDS = (
    "{% for m in messages %}{{ '<|im_' + m['role'] + '|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>' }}{% endif %}"
)
MARKUP = (
    *("<think>", "</think>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_tool|>"),
    *("<|im_middle|>", "<|tool_call|>", "<tool_call>", "</tool_call>", "<|return|>"),
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


def answers(tokenizer: Any, sample: Sample) -> list[str]:
    return [tokenizer.decode(sample.token_ids[a:b]) for a, b in sample.runs]


def served(
    tokenizer: Any, messages: list[dict[str, Any]], sample: Sample, tools: Any = None
) -> None:
    """Every supervised run of a sample stands where the server's prompt of that turn ends."""
    prompts = [
        encode_prompt(tokenizer, messages[:turn], tools)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for start, _ in sample.runs:
        assert sample.token_ids[:start] in prompts


def test_every_answer_is_supervised_with_its_end(tokenizer: Any) -> None:
    messages = _turns("One?", "Yes, one.", "Two?", "Two, too.")
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, sample) == ["Yes, one.<|im_end|>", "Two, too.<|im_end|>"]
    assert sample.token_ids[-1] == 2
    served(tokenizer, messages, sample)


def test_system_prompts_are_context(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *_turns("One?", "Yes.")]
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert tokenizer.decode(sample.token_ids[: sample.runs[0][0]]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    )


def _thinking(*pairs: tuple[str, str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for question, thought, answer in pairs:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": thought})
    return messages


def test_earlier_thoughts_split_a_conversation_as_kimi_serves_it(tokenizer: Any) -> None:
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    tokenizer.chat_template = KIMI
    messages = _thinking(("One?", "hmm", "Yes."), ("Two?", "well", "No."))
    first, second = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, first) == ["hmm</think>Yes.<|im_end|>"]
    assert answers(tokenizer, second) == ["well</think>No.<|im_end|>"]
    # The earlier answer stands there as the server would show it again: its thought is gone.
    assert tokenizer.decode(second.token_ids[: second.runs[0][0]]) == (
        "<|im_user|>user<|im_middle|>One?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Yes.<|im_end|>"
        "<|im_user|>user<|im_middle|>Two?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    for sample in (first, second):
        served(tokenizer, messages, sample)


def test_without_thoughts_kimi_is_one_sample(tokenizer: Any) -> None:
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    tokenizer.chat_template = KIMI
    messages = _turns("One?", "Yes.", "Two?", "No.")
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, sample) == ["</think>Yes.<|im_end|>", "</think>No.<|im_end|>"]
    served(tokenizer, messages, sample)


def test_tool_calls_are_answers_and_their_results_context(tokenizer: Any) -> None:
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    call = {"function": {"name": "count", "arguments": "{}"}, "type": "function", "id": "c:0"}
    tools = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "ask"},
        {"role": "tool", "content": "7", "tool_call_id": "c:0"},
        {"role": "assistant", "content": "Seven.", "reasoning_content": "so"},
    ]
    tokenizer.chat_template = QWEN3
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, sample) == [
        '<think>\nask\n</think>\n\n<tool_call>{"name": "count", "arguments": "{}"}</tool_call>'
        "<|im_end|>",
        "<think>\nso\n</think>\n\nSeven.<|im_end|>",
    ]
    served(tokenizer, messages, sample)
    # A further question makes Qwen3 forget both thoughts: what was one sample becomes two.
    more = [*messages, *_thinking(("Sure?", "yes", "Yes."))]
    first, second = encode_conversation(tokenizer, more, [2])
    assert first == sample
    assert answers(tokenizer, second) == ["<think>\nyes\n</think>\n\nYes.<|im_end|>"]
    assert "<think>\nso" not in tokenizer.decode(second.token_ids)
    served(tokenizer, more, second)
    # The tools on offer are part of every prompt.
    tokenizer.chat_template = KIMI
    (sample, _) = encode_conversation(tokenizer, messages, [2], tools)
    assert tokenizer.decode(sample.token_ids).startswith("<|im_system|>tool_declare<|im_middle|>[{")
    assert answers(tokenizer, sample) == ["ask</think><|tool_call|>count{}<|im_end|>"]
    served(tokenizer, messages, sample, tools)


def test_an_answer_that_ends_otherwise_when_more_follows(tokenizer: Any) -> None:
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    tokenizer.chat_template = TWO_ENDS
    ends = [2, tokenizer.convert_tokens_to_ids("<|return|>")]
    samples = encode_conversation(tokenizer, _turns("One?", "Yes.", "Two?", "No."), ends)
    assert [answers(tokenizer, sample) for sample in samples] == [
        ["Yes.<|return|>"],
        ["No.<|return|>"],
    ]


def test_templates_that_are_refused(tokenizer: Any) -> None:
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    tokenizer.chat_template = R1
    with pytest.raises(HarnessError, match="where generation would begin") as caught:
        encode_conversation(tokenizer, _turns("One?", "hmm</think>Yes."), [2], where="prompt 5")
    assert "prompt 5, message 1, token" in str(caught.value) and "<think>" in str(caught.value)
    assert "got: 'Yes.<|im_end|>'" in str(caught.value)
    tokenizer.chat_template = TWO_ENDS
    with pytest.raises(HarnessError, match="without a token that ends generation") as caught:
        encode_conversation(tokenizer, _turns("One?", "Yes."), [2])
    assert "['<|im_end|>']" in str(caught.value) and "<|return|>" in str(caught.value)
    tokenizer.chat_template = KIMI.replace("{% if loop.last %}", "{% if false %}")
    with pytest.raises(HarnessError, match="drops an answer's own thought") as caught:
        encode_conversation(tokenizer, _thinking(("One?", "because", "Yes.")), [2])
    assert "'because'" in str(caught.value)


# ChatML whose content goes through a filter, as {{ FILTER }}.
FILTERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ FILTER }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("filter", "at", "rule", "got"),
    [
        ("m['content'] | lower", 0, "Two  lines:", " two  lines:"),
        ("m['content'].split() | join(' ')", 4, " lines:\\n\\n  one\\n", "lines: one"),
        ("m['content'] | replace('\\n\\n', '\\n')", 12, "\\n  one", "  one"),
        ("m['content'] | escape", 20, " two", "amp; two"),
        ("m['content'][:13]", 12, "\\n  one", "<|im_end|>"),
        ("'' if m['role'] == 'assistant' else m['content']", 0, "Two  lines:", "<|im_end|>"),
    ],
)
def test_a_template_that_alters_an_answer(
    tokenizer: Any, filter: str, at: int, rule: str, got: str
) -> None:
    tokenizer.chat_template = FILTERED.replace("FILTER", filter)
    turns = _turns("one?", " Two  lines:\n\n  one\n& two \n")
    with pytest.raises(HarnessError, match="alters the text of an answer") as caught:
        encode_conversation(tokenizer, turns, [2], where="prompt 5")
    text = str(caught.value)
    assert f"prompt 5, message 1, character {at} of its text" in text
    assert f"goes on with '{rule}" in text and f"got: '{got}" in text and "keep_given" in text


def test_an_end_of_generation_within_an_answer(tokenizer: Any) -> None:
    """The rest of it would lie behind the end, unsupervised."""
    with pytest.raises(HarnessError, match=r"alters[\s\S]*goes on with ' And more.'"):
        encode_conversation(tokenizer, _turns("One?", "Yes.<|im_end|> And more."), [2])
    # Data that writes the end out has it twice; one belongs to the answer.
    (sample,) = encode_conversation(tokenizer, _turns("One?", "Yes.<|im_end|>"), [2])
    assert answers(tokenizer, sample) == ["Yes.<|im_end|>"]


def test_templates_that_trim_are_taken_as_they_render(tokenizer: Any) -> None:
    """As Llama 3's and Gemma's do, in the answer and again when it is context."""
    tokenizer.chat_template = FILTERED.replace("FILTER", "m['content'] | trim")
    messages = _turns("One?", "\n Two  words.\n", "Two?", "No. ")
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, sample) == ["Two  words.<|im_end|>", "No.<|im_end|>"]
    served(tokenizer, messages, sample)


def test_thoughts_within_the_text_may_move(tokenizer: Any) -> None:
    """Qwen3 takes a thought out of the content and sets it in lines of its own."""
    tokenizer.add_tokens(list(MARKUP), special_tokens=True)
    apart = (
        "{{ '<think>\\n' + m['content'].split('</think>')[0].split('<think>')[-1].strip('\\n') }}"
        "{{ '\\n</think>\\n\\n' + m['content'].split('</think>')[-1].lstrip('\\n') }}"
    )
    template = FILTERED.replace("{{ FILTER }}", apart)
    tokenizer.chat_template = template
    messages = _turns("One?", "<think>hmm</think>Yes,  one.")
    (sample,) = encode_conversation(tokenizer, messages, [2])
    assert answers(tokenizer, sample) == ["<think>\nhmm\n</think>\n\nYes,  one.<|im_end|>"]
    tokenizer.chat_template = template.replace("lstrip('\\n')", "lstrip('\\n') | lower")
    with pytest.raises(HarnessError, match=r"alters[\s\S]*goes on with 'Yes,  one.'"):
        encode_conversation(tokenizer, messages, [2])


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% for m in messages %}{{ m['content'] }", "TemplateSyntaxError"),
        ("{{ messages[0]['content']['text'] + 1 }}", "UndefinedError"),
        ("{{ 'a' + messages }}", "TypeError"),
    ],
)
def test_what_a_template_does_not_render_is_named(tokenizer: Any, template: str, got: str) -> None:
    tokenizer.chat_template = template
    rule = rf"does not render[\s\S]*roles user that begins 'One\?'[\s\S]*got: {got}"
    with pytest.raises(HarnessError, match=rule):
        encode_conversation(tokenizer, _turns("One?", "Yes."), [2])
    with pytest.raises(HarnessError, match=rf"does not render[\s\S]*got: {got}"):
        user_opening(tokenizer, None)


def test_a_conversation_without_answer_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(HarnessError, match="does not end with an answer") as caught:
        encode_conversation(tokenizer, _turns("One?"), [2], where="prompt 5")
    assert "where: prompt 5" in str(caught.value) and "keep_given" in str(caught.value)


def test_what_stands_where_the_assistant_begins(tokenizer: Any) -> None:
    assert tokenizer.decode(generation_opening(tokenizer)) == "<|im_start|>assistant\n"


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
