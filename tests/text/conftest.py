"""Tokenizers of every kind the detokenizer knows, made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fastgen import text
from fastgen.testing.tokenizers import byte_tokenizer, save_tokenizer

WORDS = ["▁", "▁▁", "a", "b", "▁a", "a▁", "▁b▁a", "é", "▁é", "😀", "<0xZZ>", "<0x4>", "x", "##x", "</w>"]


def sentencepiece_like() -> Tokenizer:
    """Llama 2's shape: <unk>, <s>, </s>, 256 byte tokens from id 3, then words; an added token above a hole."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(WORDS)} | {"far": 290}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken(" two words ", normalized=False)])
    return tokenizer


DECODERS: dict[str, Any] = {
    "llama2": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(prepend_scheme="always"),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "fallback-metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "none": None,
}


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], text.Tokenizer]:
    """A tokenizer by the name of its decoder; "bytes" for byte-level BPE."""
    made: dict[str, text.Tokenizer] = {}

    def build(name: str) -> text.Tokenizer:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            if name == "bytes":
                byte_tokenizer(directory, merges=[(b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x98"), (b"a", b"\xc3")])
            else:
                tokenizer = sentencepiece_like()
                if DECODERS[name] is not None:
                    tokenizer.decoder = DECODERS[name]
                save_tokenizer(tokenizer, directory, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
            made[name] = text.Tokenizer.load(directory)
        return made[name]

    return build


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> text.Tokenizer:
    """Byte-level, no merges: id ``b`` is the byte ``b``; <bos> 256, <eos> 257, <pad> 258."""
    return text.Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with BOS put before every text by the tokenizer, as a directory."""
    return byte_tokenizer(tmp_path_factory.mktemp("bos"), add_bos=True)
