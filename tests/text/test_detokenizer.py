"""Incremental decoding against the whole decode of transformers."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.text import Detokenizer, Tokenizer
from fastgen.text.decoders import IdFilter, Window

Make = Callable[[str], Tokenizer]
EXACT = ["bytes", "metaspace", "metaspace-never", "none"]
FALLBACK = ["llama2", "gemma", "fallback-metaspace"]


def pieces(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """``ids`` in pieces of these sizes, over and over."""
    start = turn = 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        yield ids[start : start + size]
        start, turn = start + size, turn + 1


def stream(tokenizer: Tokenizer, ids: Iterable[list[int]], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(piece) for piece in ids] + [detokenizer.flush()]


def whole(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    """What transformers says. It takes no negative ids."""
    real = [token for token in ids if token >= 0]
    return str(tokenizer._hf.decode(real, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


ids_of_bytes = st.lists(
    st.one_of(
        st.integers(-2, 300),
        st.sampled_from([0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xE0, 0xC0, 0xF4, 0x90]),
    ),
    max_size=40,
)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=100, deadline=None)
@given(ids=ids_of_bytes, sizes=sizes, skip=st.booleans())
def test_b1_deltas_add_up_to_the_whole_decode(
    make: Make, kind: str, ids: list[int], sizes: list[int], skip: bool
) -> None:
    tokenizer = make(kind)
    assert "".join(stream(tokenizer, pieces(ids, sizes), skip=skip)) == whole(tokenizer, ids, skip=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == whole(tokenizer, ids, skip=skip)


def byte_runs(ids: list[int]) -> list[bytes]:
    """The bytes of each unbroken run of byte tokens (ids 3 to 258); ids without a token do not break one."""
    kept = [i for i in ids if 0 <= i < 274 or i in (275, 276, 290)]
    marks = "".join("b" if 3 <= i < 259 else "." for i in kept)
    return [bytes(i - 3 for i in kept[m.start() : m.end()]) for m in re.finditer("b+", marks)]


def mixed(run: bytes) -> bool:
    """Whether a run holds whole characters and ill-formed bytes both."""
    lenient = run.decode("utf-8", errors="ignore")
    return 0 < len(lenient.encode()) < len(run)


characters = st.sampled_from("aé€😀\n")
good_bytes = characters.map(lambda c: [3 + byte for byte in c.encode()])
bad_bytes = st.sampled_from([[3 + 0x80], [3 + 0xC3], [3 + 0xF0, 3 + 0x9F], [3 + 0xFF, 3 + 0x80]])
words = st.sampled_from([259, 260, 261, 263, 264, 266, 268, 270, 1, 275, 276, 290, 280, 291]).map(lambda i: [i])


@pytest.mark.parametrize("kind", FALLBACK)
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(good_bytes, words, bad_bytes), max_size=20), sizes=sizes, skip=st.booleans())
def test_b1_byte_fallback_adds_up_too(
    make: Make, kind: str, parts: list[list[int]], sizes: list[int], skip: bool
) -> None:
    tokenizer, ids = make(kind), [token for part in parts for token in part]
    streamed = "".join(stream(tokenizer, pieces(ids, sizes), skip=skip))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)
    kept = [token for token in ids if not (skip and token in (0, 1, 2))]
    if not any(mixed(run) for run in byte_runs(kept)):
        assert streamed == whole(tokenizer, ids, skip=skip)


def test_b1_byte_fallback_keeps_whole_characters_of_a_broken_run(make: Make) -> None:
    """The one place where a stream cannot give what the whole decode gives: "é" was right and has gone out."""
    tokenizer = make("llama2")
    ids = [3 + byte for byte in "é".encode() + b"\x80"]
    assert stream(tokenizer, [[i] for i in ids]) == ["", "é", "\ufffd", ""]
    assert whole(tokenizer, ids) == "\ufffd\ufffd\ufffd"


def test_b1_one_byte_at_a_time(plain: Tokenizer) -> None:
    ids = list("a😀é한\n".encode())
    assert stream(plain, [[i] for i in ids]) == ["a", "", "", "", "😀", "", "é", "", "", "한", "\n", ""]


def test_b1_a_truncated_tail_is_one_replacement_character(plain: Tokenizer) -> None:
    assert stream(plain, [[97], [0xF0], [0x9F]]) == ["a", "", "", "\ufffd"]


def test_b1_a_lone_continuation_byte_blocks_nothing(plain: Tokenizer) -> None:
    assert stream(plain, [[0x80], [97], [98]]) == ["\ufffd", "a", "b", ""]


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60))
def test_b1_never_holds_more_than_a_character_needs(plain: Tokenizer, raw: bytes) -> None:
    detokenizer, out = Detokenizer(plain), ""
    for count, byte in enumerate(raw, 1):
        out += detokenizer.push([byte])
        certain = raw[: max(count - 3, 0)].decode(errors="replace")
        assert len(out) >= len(certain) - 1  # the last of them may still be the start of a character


@pytest.mark.parametrize("kind", [*EXACT, *FALLBACK])
def test_empty_and_special_only(make: Make, kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.decode([]) == whole(tokenizer, []) == ""
    specials = sorted(tokenizer._special)
    assert tokenizer.decode(specials) == ""
    assert tokenizer.decode(specials, skip_special_tokens=False) == whole(tokenizer, specials, skip=False) != ""


def test_a18_ids_without_a_token_add_nothing(make: Make) -> None:
    """Holes, ids past the end and negative ids never raise."""
    tokenizer = make("llama2")
    assert tokenizer.num_ids == 291
    assert tokenizer.decode([261, 280, 290, 291, 10**12, -1, 275]) == "afar<tool>"


@pytest.mark.real_model
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=sizes, skip=st.booleans())
def test_b1_real_tokenizer(real_model: Path, seed: int, sizes: list[int], skip: bool) -> None:
    tokenizer = real_tokenizer(real_model)
    draw = random.Random(seed)
    ids = [draw.randrange(tokenizer.num_ids + 50) for _ in range(100)]
    assert "".join(stream(tokenizer, pieces(ids, sizes), skip=skip)) == whole(tokenizer, ids, skip=skip)


@pytest.mark.real_model
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=50))
def test_b1_real_tokenizer_on_text(real_model: Path, text: str) -> None:
    """Token by token. (The model has no tokens for some rare bytes, so not every text comes back whole.)"""
    tokenizer = real_tokenizer(real_model)
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ([i] for i in ids), skip=False)) == whole(tokenizer, ids, skip=False)


_loaded: dict[Path, Tokenizer] = {}


def real_tokenizer(directory: Path) -> Tokenizer:
    if directory not in _loaded:
        _loaded[directory] = Tokenizer.load(directory)
    return _loaded[directory]


def test_work_per_token_does_not_grow(plain: Tokenizer) -> None:
    """What is fed to the decoder is one token, whatever came before; and nothing where its text is known."""
    detokenizer, fed = Detokenizer(plain), []
    chain = detokenizer._feed._inner  # type: ignore[attr-defined]
    push = chain.push
    chain.push = lambda token: fed.append(len(token)) or push(token)
    assert detokenizer.push([0xC3, 0xA9] * 2500) == "é" * 2500
    assert fed == [1] * 5000
    assert detokenizer.push([97] * 5000) == "a" * 5000
    assert len(fed) <= 5001


class Forgetful(dict[int, str]):
    def __setitem__(self, token: int, text: str) -> None:
        pass


@pytest.mark.parametrize("kind", EXACT + FALLBACK)
def test_known_texts_change_nothing(make: Make, kind: str) -> None:
    """Whatever comes first, in the middle of a character, or after others: as from a decoder that knows no texts."""
    tokenizer = make(kind)
    ids = [0xC3, 0xA9, 97, 32, 257] if kind == "bytes" else [3 + 0xC3, 3 + 0xA9, 259, 261, 263, 266, 267, 1, 290, 295]
    for skip, answer in itertools.product((False, True), itertools.product(ids, repeat=3)):
        known = tokenizer.decoder(skip_special_tokens=skip)
        assert isinstance(known, IdFilter)
        assert tokenizer._new_chain is not None
        forgetful = IdFilter(tokenizer._new_chain(), known._resolve, known._skip, Forgetful())
        assert [known.push(token) for token in answer] == [forgetful.push(token) for token in answer]
        assert known.flush() == forgetful.flush()
        assert not forgetful._texts
    assert len(tokenizer._settled_texts[True]) >= len(ids) // 2, "the control: some are known"


def test_a_tokenizer_in_plain_python() -> None:
    """Known to nobody: decoded through a window of a few tokens."""
    from transformers import ByT5Tokenizer

    tokenizer = Tokenizer(ByT5Tokenizer())
    text = "a😀é한\n the end." * 20
    ids = tokenizer.encode(text, add_special_tokens=False)
    out = stream(tokenizer, [[i] for i in ids])
    assert out[:5] == ["a", "", "", "", "😀"]
    assert "".join(out) == text == tokenizer.decode(ids)
    assert tokenizer.token_text(ids[0]) == "a"
    assert tokenizer.token_text(10**9) == tokenizer.token_text(-1) == ""


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_window_is_exact_on_well_formed_text(text: str) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode(errors="replace")

    window = Window(decode)
    assert "".join([window.push(byte) for byte in text.encode()]) + window.flush() == text
    assert longest <= 8


def test_window_lets_ill_formed_bytes_go() -> None:
    window = Window(lambda ids: bytes(ids).decode(errors="replace"))
    out = [window.push(0x80) for _ in range(50)]
    assert len("".join(out)) >= 46
    assert len("".join(out) + window.flush()) == 50


@pytest.mark.parametrize("kind", [*EXACT, *FALLBACK])
def test_token_text_reads_as_in_the_middle(make: Make, kind: str) -> None:
    tokenizer = make(kind)
    for token in [*range(tokenizer.num_ids + 3), -1, 2**40]:
        text = tokenizer.token_text(token)
        assert isinstance(text, str)
        assert text == tokenizer.token_text(token)


def test_token_text_keeps_spaces_and_names(make: Make, plain: Tokenizer) -> None:
    assert make("llama2").token_text(263) == " a"
    assert make("metaspace").token_text(263) == " a"
    assert make("llama2").token_text(1) == "<s>"
    assert [plain.token_text(i) for i in (97, 0xF0, 257, 258, 259, -5)] == ["a", "\ufffd", "<eos>", "<pad>", "", ""]
