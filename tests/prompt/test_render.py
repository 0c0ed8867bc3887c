"""Rendering chats of all kinds of templates: landmarks are found by comparing text."""

from __future__ import annotations

from typing import Any

import pytest

from rag_kvcache.errors import ChatTemplateError
from rag_kvcache.model.tokenizer import PromptTokenizer
from rag_kvcache.prompt.render import Rendered, render
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

SYSTEM = {"role": "system", "content": "You help."}
Q1 = {"role": "user", "content": "How long?"}
A1 = {"role": "assistant", "content": "Two years."}
Q2 = {"role": "user", "content": "And shipping?"}

PROMPT_END = "{% if add_generation_prompt %}[assistant]{% endif %}"
TRIMS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}" + PROMPT_END
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TRIMS
)
ALTERNATES = (
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}" + PROMPT_END
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}[system]Be kind.{% endif %}" + TRIMS.replace(
    " | trim", ""
)
SYSTEM_IN_FIRST_USER = (  # Gemma
    "{% set s = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set rest = messages[1:] if s else messages %}"
    "{% for m in rest %}[{{ m['role'] }}]{% if loop.first %}{{ s }}{% endif %}{{ m['content'] }}{% endfor %}"
    + PROMPT_END
)
SYSTEM_IN_LAST_USER = (  # Mistral
    "{% set s = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% set rest = messages[1:] if s else messages %}"
    "{% for m in rest %}[{{ m['role'] }}]"
    "{% if loop.last and m['role'] == 'user' %}{{ s }}{% endif %}{{ m['content'] }}{% endfor %}" + PROMPT_END
)
BREAKS = "{{ messages[7]['content']['no'].such }}"


def rendered(template: str, *messages: dict[str, Any]) -> Rendered:
    tokenizer = PromptTokenizer(tiny_tokenizer())
    tokenizer._tokenizer.chat_template = template
    return render(messages, tokenizer)


def parts(r: Rendered) -> tuple[str, str, str]:
    """The text before the conversation, the earlier turns, the current turn."""
    assert r.static_stop is not None
    return r.text[: r.static_stop], r.text[r.static_stop : r.turn_start], r.text[r.turn_start :]


class TestPlainText:
    def test_is_taken_as_it_is(self) -> None:
        r = render(" as it is \n", PromptTokenizer(tiny_tokenizer()))
        assert r == Rendered(" as it is \n", None, 0, None)
        assert not r.has_history


class TestLandmarks:
    def test_of_a_first_question(self) -> None:
        assert parts(rendered(CHAT_TEMPLATE, SYSTEM, Q1)) == (
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n",
            "",
            "How long?<|im_end|>\n<|im_start|>assistant\n",
        )
        assert not rendered(CHAT_TEMPLATE, SYSTEM, Q1).has_history

    def test_without_a_system_message(self) -> None:
        assert parts(rendered(CHAT_TEMPLATE, Q1))[0] == "<|im_start|>user\n"

    def test_of_several_system_messages(self) -> None:
        developer = {"role": "developer", "content": "Be brief."}
        before, _, now = parts(rendered(CHAT_TEMPLATE, SYSTEM, developer, Q1))
        assert before.endswith("Be brief.<|im_end|>\n<|im_start|>user\n")
        assert now.startswith("How long?")

    def test_of_a_conversation(self) -> None:
        r = rendered(CHAT_TEMPLATE, SYSTEM, Q1, A1, Q2)
        before, history, now = parts(r)
        assert before.endswith("<|im_start|>user\n")
        assert history.startswith("How long?")
        assert "Two years." in history
        assert now.startswith("And shipping?")
        assert r.has_history

    def test_the_history_of_a_longer_conversation_begins_with_that_of_the_shorter(self) -> None:
        shorter = rendered(CHAT_TEMPLATE, SYSTEM, Q1, A1, Q2)
        longer = rendered(CHAT_TEMPLATE, SYSTEM, Q1, A1, Q2, A1, Q1)
        assert longer.static_stop == shorter.static_stop
        assert longer.text.startswith(shorter.text[: shorter.turn_start])

    def test_what_follows_the_last_user_message_is_its_turn(self) -> None:
        tool = {"role": "tool", "content": "The kettle costs 30."}
        _, history, now = parts(rendered(CHAT_TEMPLATE, SYSTEM, Q1, A1, Q2, A1, tool))
        assert "And shipping?" not in history
        assert now.startswith("And shipping?")
        assert "The kettle costs 30." in now

    def test_two_questions_that_begin_alike_are_told_from_the_system_prompt(self) -> None:
        one = rendered(CHAT_TEMPLATE, SYSTEM, {"role": "user", "content": "How long is it?"})
        two = rendered(CHAT_TEMPLATE, SYSTEM, {"role": "user", "content": "How long was it?"})
        assert parts(one)[0] == parts(two)[0]

    def test_an_empty_question(self) -> None:
        before, history, now = parts(rendered(CHAT_TEMPLATE, SYSTEM, {"role": "user", "content": ""}))
        assert before.endswith("<|im_start|>user\n")
        assert history == ""
        assert now.startswith("<|im_end|>")

    def test_only_a_system_message(self) -> None:
        before, history, now = parts(rendered(CHAT_TEMPLATE, SYSTEM))
        assert before.startswith("<|im_start|>system\nYou help.<|im_end|>")
        assert history == ""
        assert now.endswith("assistant\n")


class TestTemplates:
    def test_that_trim(self) -> None:
        spaced = [{**m, "content": f"\n  {m['content']}  \n"} for m in (SYSTEM, Q1, A1, Q2)]
        assert parts(rendered(TRIMS, *spaced)) == (
            "[system]You help.[user]",
            "How long?[assistant]Two years.[user]",
            "And shipping?[assistant]",
        )

    def test_that_have_a_system_prompt_of_their_own(self) -> None:
        before, _, now = parts(rendered(DEFAULT_SYSTEM, Q1))
        assert before == "[system]Be kind.[user]"
        assert now == "How long?[assistant]"

    def test_that_put_the_system_prompt_into_the_first_user_message(self) -> None:
        assert parts(rendered(SYSTEM_IN_FIRST_USER, SYSTEM, Q1, A1, Q2)) == (
            "[user]You help.\n\n",
            "How long?[assistant]Two years.[user]",
            "And shipping?[assistant]",
        )

    def test_that_put_the_system_prompt_into_the_last_user_message(self) -> None:
        before, history, now = parts(rendered(SYSTEM_IN_LAST_USER, SYSTEM, Q1, A1, Q2))
        assert before == "[user]"
        assert history == "How long?[assistant]Two years.[user]You help.\n\n"
        assert now == "And shipping?[assistant]"

    def test_that_want_strict_alternation(self) -> None:
        before, history, now = parts(rendered(ALTERNATES, Q1, A1, Q2))
        assert (before, history) == ("[user]", "How long?[assistant]Two years.[user]")
        assert now.startswith("And shipping?")

    def test_that_refuse_the_system_role_say_so(self) -> None:
        with pytest.raises(ChatTemplateError, match="no system role"):
            rendered(REFUSES_SYSTEM, SYSTEM, Q1)

    def test_that_break_in_any_way_are_a_clear_error(self) -> None:
        with pytest.raises(ChatTemplateError, match="pass the prompt as text"):
            rendered(BREAKS, Q1)

    def test_that_refuse_to_be_asked_about_the_beginning_cost_landmarks_only(self) -> None:
        """Such a template takes the whole conversation, but not a user message behind its beginning."""
        no_other = (
            "{% if messages[-1]['content'] != 'And shipping?' %}{{ raise_exception('no') }}{% endif %}"
            + TRIMS
        )
        r = rendered(no_other, Q1, A1, Q2)
        assert (r.static_stop, r.turn_start) == (0, 0)
        assert r.text.endswith("[user]And shipping?[assistant]")

    def test_a_tokenizer_without_a_template_is_a_clear_error(self) -> None:
        tokenizer = PromptTokenizer(tiny_tokenizer())
        tokenizer._tokenizer.chat_template = None
        with pytest.raises(ChatTemplateError):
            render([Q1], tokenizer)
