"""The bytes of single tokens: joined, they are what decoding gives; and which template a chat would take."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fastgen.testing.tokenizers import build_byte_tokenizer, byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer


@pytest.mark.parametrize(
    "kind", ["bytes", "llama2", "gemma", "metaspace", "metaspace-never", "fallback-metaspace", "none"]
)
def test_joined_they_are_the_text(make: Callable[[str], Tokenizer], kind: str) -> None:
    tokenizer = make(kind)
    rng = random.Random(1)
    known = [token for token in range(tokenizer.num_ids) if tokenizer.token_bytes(token) is not None]
    assert len(known) > 256
    first = tokenizer.encode("x", add_special_tokens=False)[-1]  # past the start, where a space may be left out
    for _ in range(300):
        ids = [first, *rng.choices(known, k=6)]
        joined = b"".join(tokenizer.token_bytes(token) or b"" for token in ids[1:])
        try:
            text = joined.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(ids).removeprefix(tokenizer.decode([first])) == text


def test_special_tokens_and_holes_have_none(make: Callable[[str], Tokenizer]) -> None:
    tokenizer = make("llama2")
    assert tokenizer.token_bytes(1) is None
    assert tokenizer.token_bytes(285) is None
    assert tokenizer.token_bytes(-1) is None
    assert tokenizer.token_bytes(10**9) is None
    assert tokenizer.token_bytes(3 + 0xE9) == b"\xe9"


def test_template_text(tmp_path: Path) -> None:
    one = Tokenizer.load(byte_tokenizer(tmp_path / "one", chat_template="{{ messages }}"))
    assert one.template_text() == one.template_text(tools=True) == "{{ messages }}"
    several = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}", "rag": "{{ 3 }}"}
    directory = save_tokenizer(build_byte_tokenizer(), tmp_path / "several", chat_template=several, eos_token="<eos>")
    two = Tokenizer.load(directory)
    assert (two.template_text(), two.template_text(tools=True), two.template_text("rag")) == tuple(several.values())
    assert two.template_text("nobody") is None
    assert Tokenizer.load(byte_tokenizer(tmp_path / "none", chat_template=None)).template_text() is None
