"""What a logits processor's factory may be given, and the check that servers make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen.core.plugin import LogitsProcessorSpec, hookimpl, registered
from fastgen.core.processors import checked_already
from fastgen.errors import PluginError
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import SamplingParams


def test_a_factory_gets_what_it_needs(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def factory(options: dict[str, Any], **given: Any) -> Any:
        seen.append(given)
        return lambda ids, logits: logits

    class Plugin:
        @hookimpl
        def fastgen_logits_processors(self) -> list[LogitsProcessorSpec]:
            return [
                LogitsProcessorSpec("plain", factory),
                LogitsProcessorSpec("more", factory, needs=("tokenizer", "stop_token_ids")),
            ]

    with registered(Plugin(), name="needs"), fastgen.pipeline(tiny_llama(tmp_path)) as pipe:
        pipe("A", max_new_tokens=1, logits_processors={"plain": {}})
        assert set(seen[-1]) == {"vocab_size", "prompt_token_ids"}
        pipe("A", max_new_tokens=1, logits_processors={"more": {}}, stop_token_ids=[66])
        assert seen[-1]["tokenizer"] is pipe.tokenizer
        assert seen[-1]["stop_token_ids"] == frozenset({66, 257})
        pipe("A", max_new_tokens=1, logits_processors={"more": {}}, ignore_eos=True)
        assert seen[-1]["stop_token_ids"] == frozenset()


def test_whether_the_options_were_checked(tmp_path: Path) -> None:
    seen: list[bool] = []

    def factory(options: dict[str, Any], *, checked: bool, **given: Any) -> Any:
        seen.append(checked)
        return lambda ids, logits: logits

    class Plugin:
        @hookimpl
        def fastgen_logits_processors(self) -> list[LogitsProcessorSpec]:
            return [LogitsProcessorSpec("asks", factory, needs=("checked",))]

    params = SamplingParams(logits_processors={"asks": {}})
    with registered(Plugin(), name="checked"), fastgen.Engine.load(tiny_llama(tmp_path)) as engine:
        engine.add([65], params)
        assert not any(seen)
        seen.clear()
        with checked_already():
            engine.add([65], params)
        assert all(seen)
        seen.clear()
        engine.check([65], params)
        assert seen == [False]


def test_needs_are_checked() -> None:
    with pytest.raises(PluginError, match="Did you mean 'tokenizer'"):
        LogitsProcessorSpec("x", print, needs=("tokeniser",))
    with pytest.raises(PluginError, match="write a tuple"):
        LogitsProcessorSpec("x", print, needs="tokenizer")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="check must be a function"):
        LogitsProcessorSpec("x", print, check=5)  # type: ignore[arg-type]


def test_a_check_is_loaded_when_asked_for() -> None:
    assert LogitsProcessorSpec("x", print).load_check() is None
    assert LogitsProcessorSpec("x", print, check=print).load_check() is print
    assert LogitsProcessorSpec("x", print, check="json:dumps").load_check().__name__ == "dumps"  # type: ignore[union-attr]
    with pytest.raises(PluginError, match="no_such_module"):
        LogitsProcessorSpec("x", print, check="no_such_module:f").load_check()
