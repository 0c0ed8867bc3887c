"""The exceptions: their tree is the one in the docstring, their messages say what to do."""

from __future__ import annotations

import re

import pytest

from rag_kvcache import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
}


def tree_in_docstring() -> dict[str, set[str]]:
    """Class name -> names of its bases, read from the module's docstring."""
    tree: dict[str, set[str]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:\s{2,}|$)", line)
        if not found:
            continue
        depth, name, other = len(found[1]) // 4, found[2], found[3]
        parents[depth:] = [name]
        tree[name] = {parents[depth - 1] if depth else "Exception", *([other] if other else [])}
    return tree


def test_the_documented_tree_is_the_real_one() -> None:
    assert tree_in_docstring() == {
        name: {base.__name__ for base in value.__bases__} for name, value in CLASSES.items()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_is_caught_by_the_base(name: str) -> None:
    assert issubclass(CLASSES[name], errors.RagKVCacheError)
    assert CLASSES[name].__doc__


def test_wrong_settings_are_caught_as_the_standard_kinds_too() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert issubclass(errors.EngineClosedError, RuntimeError)


@pytest.mark.parametrize("name", CLASSES)
def test_a_wrong_request_is_none_that_frameworks_swallow(name: str) -> None:
    if issubclass(CLASSES[name], errors.RequestError):
        assert not issubclass(CLASSES[name], ValueError | TypeError | KeyError)


def test_a_wrong_request_is_no_wrong_configuration() -> None:
    assert not issubclass(errors.RequestError, errors.ConfigurationError)
    assert not issubclass(errors.ConfigurationError, errors.RequestError)


def test_a_missing_extra_says_how_to_install_it() -> None:
    error = errors.MissingExtraError("redis", "redis")
    assert "pip install 'rag-kvcache[redis]'" in str(error)
    assert (error.package, error.extra) == ("redis", "redis")
    assert "make it so" in str(errors.MissingExtraError("redis", "redis", install="make it so"))


def test_a_prompt_too_long_gives_all_three_numbers_and_a_remedy() -> None:
    error = errors.PromptTooLongError(1000, 30, 1024)
    assert (error.prompt_tokens, error.max_new_tokens, error.window) == (1000, 30, 1024)
    assert {"1000", "30", "1024"} <= set(re.findall(r"\d+", str(error)))
    assert "fewer documents" in str(error)
