"""Settings: keyword arguments, environment, and clear errors for what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rag_kvcache.errors import ConfigurationError
from rag_kvcache.settings import Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"RAG_KVCACHE_{name.upper()}", raising=False)


class TestDefaults:
    def test_are_those_the_issue_names(self) -> None:
        settings = Settings.make()
        assert (settings.reuse, settings.tenant) == ("exact", "default")
        assert settings.ttl_s == 3600
        assert settings.levels == ("static", "document")
        assert settings.static_scope == "tenant"
        assert settings.cache_history is True

    def test_keep_static_prompts_within_a_budget_of_their_own(self) -> None:
        settings = Settings.make(max_bytes=100)
        assert settings.static_max_bytes == Settings.make().static_max_bytes != 100


class TestSources:
    def test_an_environment_variable_beats_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAG_KVCACHE_MAX_BYTES", "512MB")
        monkeypatch.setenv("RAG_KVCACHE_REUSE", "off")
        monkeypatch.setenv("RAG_KVCACHE_LEVELS", '["static"]')
        settings = Settings.make()
        assert settings.max_bytes == 512_000_000
        assert settings.reuse == "off"
        assert settings.levels == ("static",)

    def test_a_keyword_argument_beats_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAG_KVCACHE_TTL_S", "7")
        assert Settings.make().ttl_s == 7
        assert Settings.make(ttl_s=8).ttl_s == 8

    @pytest.mark.parametrize(("given", "bytes_"), [(10, 10), ("2GiB", 2 * 1024**3), ("512MB", 512_000_000)])
    def test_byte_budgets_take_numbers_and_units(self, given: Any, bytes_: int) -> None:
        assert Settings.make(max_bytes=given).max_bytes == bytes_

    def test_a_variable_of_another_purpose_is_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAG_KVCACHE_CACHE_DIR", "/somewhere")
        Settings.make()


class TestFrozen:
    def test_a_setting_cannot_be_changed(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            Settings.make().ttl_s = 1.0

    def test_equal_settings_are_equal_and_hashable(self) -> None:
        assert len({Settings.make(ttl_s=5), Settings.make(ttl_s=5.0)}) == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_bytes", -1),
            ("max_bytes", 0),
            ("max_bytes", "many"),
            ("max_entries", 0),
            ("static_max_bytes", -5),
            ("ttl_s", 0),
            ("ttl_s", -1.0),
            ("ttl_s", float("nan")),
            ("tenant", ""),
            ("reuse", "approximate"),
            ("static_scope", "world"),
            ("levels", ("static", "question")),
            ("block_tokens", 7),
            ("max_new_tokens", 0),
            ("known_documents", -1),
            ("cache_history", "perhaps"),
            ("no_such_setting", 1),
        ],
    )
    def test_name_the_setting_and_the_value(self, name: str, value: Any) -> None:
        with pytest.raises(ConfigurationError) as raised:
            Settings.make(**{name: value})
        assert name in str(raised.value)
        assert repr(value).strip("()") in str(raised.value) or "question" in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_list_every_fault(self) -> None:
        with pytest.raises(ConfigurationError, match=r"max_bytes.*ttl_s"):
            Settings.make(max_bytes=-1, ttl_s=-1)

    @pytest.mark.parametrize(
        ("variable", "value"), [("MAX_BYTES", "many"), ("LEVELS", "static"), ("LEVELS", '["everything"]')]
    )
    def test_a_wrong_environment_variable_is_a_configuration_error(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
    ) -> None:
        monkeypatch.setenv(f"RAG_KVCACHE_{variable}", value)
        with pytest.raises(ConfigurationError, match=variable.lower()):
            Settings.make()
