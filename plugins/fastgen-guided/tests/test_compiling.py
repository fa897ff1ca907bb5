"""What takes long is done once, and holds up nobody else."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastgen_guided import processor
from fastgen_guided.processor import Guided, guided

from fastgen.text import Tokenizer

SECONDS = 30


def make(words: Tokenizer, options: Any, *, checked: bool) -> Guided:
    return guided(
        options,
        vocab_size=words.num_ids,
        prompt_token_ids=[1],
        tokenizer=words,
        stop_token_ids=words.eos_token_ids,
        checked=checked,
    )


@pytest.mark.parametrize("checked", [True, False])
def test_what_was_checked_is_not_checked_again(
    plain: Tokenizer, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    whole = processor.checked_grammar
    monkeypatch.setattr(processor, "checked_grammar", lambda options: asked.append(options) or whole(options))
    options = {"regex": "checked|twice"}
    allowed = make(plain, options, checked=checked).allowed()
    assert allowed.nonzero()[0].tolist() == [ord("c"), ord("t")]
    assert asked == ([] if checked else [options])


def test_one_is_compiled_while_another_is(plain: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()
    whole = processor.LLMatcher

    def slow(tokenizer: Any, grammar: str, **options: Any) -> Any:
        if "slow" in grammar:
            begun.set()
            assert go.wait(SECONDS)
        return whole(tokenizer, grammar, **options)

    monkeypatch.setattr(processor, "LLMatcher", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(make, plain, {"choice": ["slow"]}, checked=True)
        try:
            assert begun.wait(SECONDS)
            quick = threads.submit(make, plain, {"choice": ["quick"]}, checked=True).result(SECONDS)
            assert not first.done()
        finally:
            go.set()
        assert quick.allowed()[ord("q")]
        assert first.result(SECONDS).allowed()[ord("s")]


@pytest.mark.parametrize(("options", "works"), [({"regex": "on(c|k)e"}, True), ({"structure": {"token": 5001}}, False)])
def test_each_is_compiled_once(plain: Tokenizer, options: Any, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that this model cannot serve too."""
    compiled: list[str] = []
    whole = processor.LLMatcher

    def counted(tokenizer: Any, grammar: str, **options: Any) -> Any:
        compiled.append(grammar)
        return whole(tokenizer, grammar, **options)

    monkeypatch.setattr(processor, "LLMatcher", counted)
    for _ in range(3):
        if works:
            make(plain, options, checked=True)
        else:
            with pytest.raises(ValueError, match="Token range"):
                make(plain, options, checked=True)
    assert len(compiled) == 1
