"""What users call, and what they may get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rag_kvcache import Document, Engine, Reason, Settings
from rag_kvcache.errors import (
    ConfigurationError,
    EmptyPromptError,
    InvalidTypeError,
    ModelNotFoundError,
    PromptTooLongError,
    RequestError,
)
from tests.engine.helpers import KETTLE, RETURNS, entries, reused
from tests.tiny import tiny_model, tiny_tokenizer


def make(**settings: Any) -> Engine:
    return Engine(tiny_model(), tiny_tokenizer(), **{"max_new_tokens": 6, **settings})


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda e: e.generate(""), EmptyPromptError, "empty"),
        (lambda e: e.generate([]), EmptyPromptError, "no messages"),
        (lambda e: e.generate(7), InvalidTypeError, "iterable"),
        (lambda e: e.generate([{"content": "x"}]), InvalidTypeError, "role"),
        (lambda e: e.generate([{"role": "user", "content": {"a": 1}}]), InvalidTypeError, "text"),
        (lambda e: e.generate("x", documents="one text"), InvalidTypeError, "iterable"),
        (lambda e: e.generate("x", documents=[3]), InvalidTypeError, "Documents"),
        (lambda e: e.generate("x", max_new_tokens=0), RequestError, "at least 1"),
        (lambda e: e.generate("x", max_new_tokens=2.5), InvalidTypeError, "int"),
        (lambda e: e.generate("x", max_new_tokens=True), InvalidTypeError, "int"),
        (lambda e: e.generate("x", temperature=-1), RequestError, "temperature"),
        (lambda e: e.generate("x", temperature="hot"), InvalidTypeError, "temperature"),
        (lambda e: e.generate("x", top_p=2), RequestError, "top_p"),
        (lambda e: e.generate("x", stop=[""]), RequestError, "empty"),
        (lambda e: e.generate("x", stop=[3]), InvalidTypeError, "stop"),
        (lambda e: e.generate("x", reuse="sometimes"), RequestError, "exact, gated, always, off"),
        (lambda e: e.generate("x", tenant=""), RequestError, "tenant"),
        (lambda e: e.generate("x", generate_kwargs={"no_such_field": 1}), RequestError, "no_such_field"),
        (
            lambda e: e.generate("x", generate_kwargs={"max_new_tokens": 3}),
            RequestError,
            "pass max_new_tokens=",
        ),
        (lambda e: e.generate("x", generate_kwargs={"stop_strings": ["a"]}), RequestError, "pass stop="),
        (lambda e: e.generate("x", generate_kwargs={"num_return_sequences": 2}), RequestError, "several"),
        (
            lambda e: e.generate("x", generate_kwargs={"penalty_alpha": 0.6, "top_k": 4}),
            RequestError,
            "contrastive",
        ),
        (lambda e: e.generate("x", generate_kwargs={"eos_token_id": "x"}), RequestError, "eos_token_id"),
        (
            lambda e: e.generate("x", generate_kwargs={"repetition_penalty": "a"}),
            RequestError,
            "repetition_penalty|penalty",
        ),
        (lambda e: e.generate("x", seed=2**70), RequestError, "64 bits"),
        (lambda e: e.invalidate(None), InvalidTypeError, "Document"),
        (lambda e: e.invalidate([KETTLE.text]), InvalidTypeError, "list"),
        (
            lambda e: e.warm([KETTLE], prompt=[{"role": "user", "content": "x"}], slot="role"),
            RequestError,
            "slot",
        ),
        (lambda e: e.generate("x " * 2000), PromptTooLongError, "1024"),
        (lambda e: e.generate("x", max_new_tokens=5000), PromptTooLongError, "5000"),
        (lambda e: e.answer("", [KETTLE]), RequestError, "question"),
        (lambda e: e.warm([KETTLE], prompt="no slot here"), RequestError, "slot"),
    ],
)
def test_a_wrong_request_gets_a_typed_error_and_loses_nothing(call: Any, error: type, says: str) -> None:
    engine = make()
    engine.answer("how long?", [KETTLE])
    before = len(entries(engine))
    with pytest.raises(error, match=says):
        call(engine)
    assert len(entries(engine)) == before
    assert reused(engine.answer("how long?", [KETTLE])) == 1.0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": "much"}, "max_bytes"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"reuse": "sometimes"}, "reuse"),
        ({"recompute_share": 1.5}, "recompute_share"),
        ({"repair": "glue"}, "repair"),
        ({"gate_threshold": float("nan")}, "gate_threshold"),
        ({"tenant": ""}, "tenant"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"levels": ("question",)}, "levels"),
    ],
)
def test_a_wrong_setting_is_told_at_construction(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make(**settings)


def test_wrong_objects_are_told_at_construction() -> None:
    with pytest.raises(ConfigurationError, match="from_pretrained"):
        Engine("gpt2", tiny_tokenizer())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="tokenizer"):
        Engine(tiny_model(), "gpt2")  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError, match="folder"):
        Engine.from_pretrained("./no/such/folder")


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAG_KVCACHE_REUSE", "off")
    monkeypatch.setenv("RAG_KVCACHE_MAX_BYTES", "5MB")
    assert make().settings.reuse == "off"
    assert make(reuse="exact").settings.reuse == "exact"
    assert make(settings=Settings.make(tenant="x"), ttl_s=5).settings.tenant == "x"
    assert make().settings.max_bytes == 5_000_000


def test_a_model_saved_to_a_folder_is_loaded_by_name(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, max_new_tokens=6)
    assert engine.model_name == str(tmp_path)
    assert engine.dtype == "float32"
    assert engine.answer("how long?", [KETTLE]).text == make().answer("how long?", [KETTLE]).text


def test_warming_makes_the_first_question_a_hit() -> None:
    engine = make()
    report = engine.warm([KETTLE, RETURNS, "", "  "])
    assert (report.documents, report.built, report.cached) == (4, 2, 0)
    assert [reason for _, reason in report.skipped] == [Reason.NO_DOCUMENT_FOUND] * 2
    generation = engine.answer("how long?", [KETTLE])
    assert reused(generation) == reused(generation, "static") == 1.0
    again = engine.warm([KETTLE, RETURNS])
    assert (again.built, again.cached, again.tokens) == (0, 2, 0)
    assert generation.text == engine.answer("how long?", [KETTLE], reuse="off").text


def test_warming_for_the_callers_own_prompt() -> None:
    engine = make()
    messages = [
        {"role": "system", "content": "Answer from: <<docs>> and nothing else."},
        {"role": "user", "content": "{question}"},
    ]
    engine.warm([KETTLE], prompt=messages, slot="<<docs>>")
    asked = [{**messages[0], "content": f"Answer from: {KETTLE.text} and nothing else."}]
    generation = engine.generate([*asked, {"role": "user", "content": "how long?"}], documents=[KETTLE])
    assert reused(generation) == 1.0


def test_invalidating_a_document_drops_it_and_what_was_computed_behind_it() -> None:
    for target in (KETTLE, KETTLE.text, "kettle"):
        engine = make()
        for question in ("how long?", "what?"):
            engine.answer(question, [RETURNS, KETTLE])
            engine.answer(question, [KETTLE, RETURNS])
        assert engine.invalidate(target) > 0
        kinds = {(e.kind, e.text_digest) for e in entries(engine)}
        assert not any(d.label == "kettle" for e in entries(engine) for d in e.documents)
        assert kinds, "what stands before it stays"
        generation = engine.answer("how long?", [KETTLE, RETURNS])
        assert reused(generation) == 0.0
        assert reused(generation, "static") == 1.0
    assert engine.invalidate("all") > 0
    assert entries(engine) == []


def test_tenants_never_share_or_drop_each_others_entries() -> None:
    engine = make()
    for tenant in ("org1", "org2"):
        for question in ("how long?", "what?"):
            engine.answer(question, [KETTLE], tenant=tenant)
    assert engine.invalidate("all", tenant="org1") > 0
    assert reused(engine.answer("how long?", [KETTLE], tenant="org1")) == 0.0
    assert reused(engine.answer("how long?", [KETTLE], tenant="org2")) == 1.0


def test_changed_weights_miss() -> None:
    import torch

    engine = make()
    engine.answer("how long?", [KETTLE])
    engine.answer("what?", [KETTLE])
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(1.5)
    generation = engine.answer("how long?", [KETTLE])
    assert generation.report.reused_tokens == 0
    assert generation.text == engine.answer("how long?", [KETTLE], reuse="off").text
    assert reused(engine.answer("how long?", [KETTLE])) == 1.0
    engine.model.lm_head.weight.data.mul_(1.5)  # behind torch's back
    engine.refresh()
    assert engine.answer("how long?", [KETTLE]).report.reused_tokens == 0


def test_two_adapters_on_one_base_miss_each_other() -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), config, adapter_name="one")
    model.add_adapter("two", config)
    engine = Engine(model, tiny_tokenizer(), max_new_tokens=6)
    for adapter in ("one", "two"):
        model.set_adapter(adapter)
        first = engine.answer("how long?", [KETTLE])
        assert first.report.reused_tokens == 0
        assert first.text == engine.answer("how long?", [KETTLE], reuse="off").text
        assert reused(engine.answer("what?", [KETTLE])) == 1.0
    model.set_adapter("one")
    assert reused(engine.answer("where?", [KETTLE])) == 1.0


def test_stop_strings_end_the_answer_and_do_not_show() -> None:
    engine = make(max_new_tokens=40)
    whole = engine.generate("how long is it?")
    stop = whole.text[5:8]
    cut = engine.generate("how long is it?", stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < len(whole.token_ids)
    assert "".join(c.text for c in engine.stream("how long is it?", stop=[stop])) == cut.text


def test_the_end_of_sequence_token_ends_the_answer() -> None:
    engine = make()
    first = engine.generate("how long is it?").token_ids[1]
    engine.model.generation_config.eos_token_id = first
    ended = engine.generate("how long is it?")
    assert (ended.finish_reason, len(ended.token_ids)) == ("stop", 2)


def test_the_users_objects_are_left_as_they_were() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.train()
    model.model.layers[1].eval()
    flags = [m.training for m in model.modules()]
    config, names = model.config.to_dict(), set(vars(model))
    generation = model.generation_config.to_dict()
    engine = Engine(model, tokenizer, max_new_tokens=6)
    engine.answer("how long?", [KETTLE], temperature=0.5, top_p=0.9, seed=1, stop=["x"])
    engine.warm([RETURNS])
    assert [m.training for m in model.modules()] == flags
    assert model.config.to_dict() == config
    assert set(vars(model)) == names
    assert model.generation_config.to_dict() == generation
    assert engine.model is model
    assert engine.tokenizer is tokenizer


def test_counters_add_up_with_the_reports() -> None:
    engine = make()
    reports = [engine.answer(q, [KETTLE]).report for q in ("a?", "b?", "c?")]
    for r in reports:
        assert r.reused_tokens + r.prefilled_tokens == r.prompt_tokens
        assert sum(s.tokens for s in r.segments) == r.prompt_tokens
        assert sum(s.reused for s in r.segments) == r.reused_tokens
        assert r.ttft_s is not None
        assert 0 < r.ttft_s <= r.total_s
    stats = engine.stats()
    assert stats.requests == 3
    assert stats.prompt_tokens == sum(r.prompt_tokens for r in reports)
    assert stats.reuse_ratio == sum(r.reused_tokens for r in reports) / stats.prompt_tokens


def test_documents_as_plain_strings_and_content_parts() -> None:
    engine = make()
    text = engine.answer("how long?", [KETTLE.text]).text
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        for m in engine._rag_prompt(KETTLE.text, "how long?", None)
    ]
    assert engine.generate(parts, documents=(Document(KETTLE.text) for _ in range(2))).text == text


def test_a_slot_is_looked_for_in_the_messages_themselves() -> None:
    engine = make()
    messages = [{"role": "user", "content": "Context: <<\nX>> Question?"}]
    assert engine.warm([KETTLE], prompt=messages, slot="<<\nX>>").built == 1


def test_documents_given_but_not_in_the_prompt_are_told_whatever_else_was_reused() -> None:
    engine = make()
    prompt = "You are a helpful shop assistant. " * 20 + "Question: how long?"
    for _ in range(2):
        generation = engine.generate(prompt, documents=[KETTLE])
    assert generation.report.reused_tokens > 0
    assert generation.report.reason == Reason.NO_DOCUMENT_FOUND


@pytest.mark.parametrize("method", ["take", "place"])
def test_a_copy_that_fails_costs_the_cache_and_not_the_answer(method: str, monkeypatch: Any) -> None:
    from rag_kvcache.model.arena import Arena

    engine = make()
    expected = engine.answer("how long?", [KETTLE]).token_ids

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Arena, method, fail)
    document = KETTLE if method == "place" else RETURNS
    wanted = expected if method == "place" else engine.answer("how long?", [RETURNS], reuse="off").token_ids
    generation = engine.answer("how long?", [document])
    assert generation.token_ids == wanted
    assert generation.report.reused_tokens == 0 if method == "place" else True
    assert Reason.STORE_FAULT in {s.reason for s in generation.report.segments}
    assert sum(engine.stats().faults.values()) > 0
    monkeypatch.undo()
    assert engine.answer("how long?", [document]).token_ids == wanted
