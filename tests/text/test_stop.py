"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.text import StopMatcher, TextStream, Tokenizer


def feed(stops: list[str], parts: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What comes out for each part and at the end, and the stop string."""
    matcher = StopMatcher(stops, include_stop=include)
    out = [matcher.push(part)[0] for part in parts]
    if matcher.stop is None:
        out.append(matcher.flush())
    return out, matcher.stop


def test_b3_held_back_until_it_cannot_match() -> None:
    assert feed(["DEFGHIJ"], ["ABCDEF", "G", "HI", "J!"]) == (["ABC", "", "", ""], "DEFGHIJ")
    assert feed(["DEFGHIJ"], ["ABCDEF", "G", "HI"]) == (["ABC", "", "", "DEFGHI"], None)
    assert feed(["DEFGHIJ"], ["ABCDEF", "G", "HX"]) == (["ABC", "", "DEFGHX", ""], None)


def test_b3_holds_no_more_than_could_match() -> None:
    assert feed(["aab"], ["xaaaaa"])[0][0] == "xaaa"
    assert feed(["stop", "topics"], ["ab st"])[0][0] == "ab "
    assert feed(["abcabd"], ["abcabc"])[0][0] == "abc"
    assert feed(["zzz"], ["hello"])[0][0] == "hello"


def test_b3_earliest_start_then_first_in_the_list() -> None:
    assert feed(["ab", "abc"], ["xabc"]) == (["x"], "ab")
    assert feed(["abc", "ab"], ["xabc"]) == (["x"], "abc")
    assert feed(["bc", "abcd"], ["xabcd"]) == (["x"], "abcd")
    assert feed(["late", "soon"], ["a soon late"]) == (["a "], "soon")


def test_b3_include_keeps_the_string_and_nothing_after() -> None:
    assert feed(["ab"], ["1a", "b2", "3"], include=True) == (["1", "ab", ""], "ab")
    assert feed(["ab"], ["1a", "b2", "3"]) == (["1", "", ""], "ab")


def test_b4_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty stop"):
        StopMatcher(["a", ""])


def test_without_stop_strings_nothing_is_held() -> None:
    assert feed([], ["a", "b"]) == (["a", "b", ""], None)


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(stops=stop_lists, parts=st.lists(st.text("abc", max_size=5), max_size=12), include=st.booleans())
def test_b3_against_a_search_of_the_whole_text(stops: list[str], parts: list[str], include: bool) -> None:
    matcher, text, out = StopMatcher(stops, include_stop=include), "", ""
    for part in parts:
        text += part
        found = sorted((text.find(stop), i) for i, stop in enumerate(stops) if stop in text)
        new, stop = matcher.push(part)
        out += new
        if found:
            start, which = found[0]
            assert (stop, out) == (stops[which], text[:start] + stops[which] * include)
            assert (matcher.push("more"), matcher.flush()) == (("", stop), "")
            return
        held = max(k for k in range(len(text) + 1) if any(s[:k] == text[len(text) - k :] and k < len(s) for s in stops))
        assert (stop, out) == (None, text[: len(text) - held])
    assert out + matcher.flush() == text


def test_b3_work_is_bounded_for_long_and_many_stops() -> None:
    """The worst patterns: naive search would take 10**9 steps and more."""
    long = StopMatcher(["a" * 20_000 + "b"])
    many = StopMatcher([f"{i:04d}" * 20 for i in range(64)])
    start = time.process_time()
    for _ in range(300):
        long.push("aaaa" * 25)
        many.push("0123456789" * 10)
    assert time.process_time() - start < 5


def run(tokenizer: Tokenizer, raw: bytes, stops: list[str], **options: bool) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many tokens were taken."""
    stream, text = TextStream(tokenizer, stops=stops, **options), ""
    for count, byte in enumerate(raw, 1):
        new, stop = stream.push(byte)
        text += new
        if stop is not None:
            return text, stop, count
    return text + stream.finish(), stream.stop, len(raw)


def test_b3_the_token_that_completes_the_stop_is_known(plain: Tokenizer) -> None:
    assert run(plain, b"one STOP two", ["STOP"]) == ("one ", "STOP", 8)
    assert run(plain, b"one STOP two", ["STOP"], include_stop=True) == ("one STOP", "STOP", 8)
    assert run(plain, b"one STO", ["STOP"]) == ("one STO", None, 7)


def test_b3_a_stop_inside_the_last_character(plain: Tokenizer) -> None:
    """The stop starts with a character of four bytes; the tail of three of them is shown, not lost."""
    assert run(plain, "ab😀!".encode(), ["😀!"]) == ("ab", "😀!", 7)
    assert run(plain, "ab😀".encode()[:-1], ["😀!"]) == ("ab\ufffd", None, 5)
    assert run(plain, "ab😀".encode()[:-1], ["\ufffd"]) == ("ab", "\ufffd", 5)


def test_b4_a_stop_of_many_tokens_fires(plain: Tokenizer) -> None:
    assert run(plain, b"User: hi\n\nAssistant: yo", ["\n\nAssistant:"]) == ("User: hi", "\n\nAssistant:", 20)


def test_stop_of_a_special_token_needs_it_in_the_text(plain: Tokenizer) -> None:
    stream = TextStream(plain, stops=["<pad>"])
    assert [stream.push(i) for i in (97, 258, 98)] == [("a", None), ("", None), ("b", None)]
    stream = TextStream(plain, stops=["<pad>"], skip_special_tokens=False)
    assert [stream.push(i) for i in (97, 258)] == [("a", None), ("", "<pad>")]
