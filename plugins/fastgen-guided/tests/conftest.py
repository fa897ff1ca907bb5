"""Tokenizers of three kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from fastgen.testing.tokenizers import build_byte_tokenizer, byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer

TEXTS = [
    '{"',
    '":',
    '": "',
    '", "',
    '"}',
    "{",
    "}",
    '"name',
    "name",
    "age",
    " 42",
    "true",
    "null",
    "é",
    "an",
    "▁a",
    "\n",
]


def sentencepiece() -> Fast:
    """Llama 2's shape: three special tokens, a token for each byte, words with ▁ for a space."""
    words = [*map(chr, range(33, 127)), "▁", "▁▁", '▁"', "▁{", '▁"name', "▁4", "▁yes", "yes", *TEXTS, "東京"]
    pieces = dict.fromkeys(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    tokenizer = Fast(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level() -> Fast:
    """Byte-level BPE with some of JSON's pieces as tokens, whole characters and halves."""
    merges: list[tuple[bytes, bytes]] = []
    known = {bytes([byte]) for byte in range(256)}
    for text in TEXTS:
        spelt = text.encode()
        for end in range(2, len(spelt) + 1):
            if spelt[:end] not in known:
                merges.append((spelt[: end - 1], spelt[end - 1 : end]))
                known.add(spelt[:end])
    return build_byte_tokenizer(merges=merges)


@pytest.fixture(scope="session", params=["bytes", "byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        byte_tokenizer(directory)
    elif request.param == "byte-level":
        save_tokenizer(byte_level(), directory, eos_token="<eos>")
    else:
        save_tokenizer(sentencepiece(), directory, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return Tokenizer.load(directory)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte; <eos> is 257."""
    return Tokenizer.load(byte_tokenizer(tmp_path_factory.mktemp("plain")))
