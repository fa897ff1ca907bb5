"""Server-sent events, however the connection cuts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.client.over_http import _events

SECONDS = 20
LINES = st.binary(max_size=12).map(lambda text: text.replace(b"\n", b"\r"))
EVENTS = st.lists(st.tuples(st.sampled_from(["message", "error", "done"]), LINES), max_size=5)


def read(pieces: Iterable[bytes]) -> list[tuple[str, bytes]]:
    async def arrive() -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece

    async def collect() -> list[tuple[str, bytes]]:
        async with asyncio.timeout(SECONDS):
            return [event async for event in _events(arrive())]

    return asyncio.run(collect())


@settings(max_examples=100, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 200), max_size=12))
def test_cut_anywhere(events: list[tuple[str, bytes]], cuts: list[int]) -> None:
    stream = b": a remark\n\n" + b"".join(b"event: %s\ndata: %s\n\n" % (name.encode(), data) for name, data in events)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[begin:end] for begin, end in pairwise(places)]
    assert read(pieces) == events
    assert read([stream[i : i + 1] for i in range(len(stream))]) == events


def test_a_large_event_in_small_pieces() -> None:
    """Which are not all put together anew with each that comes: 16 MB in 64,000 pieces."""
    data = b"x" * 2**24
    stream = b"data: " + data + b"\n\n"
    assert read(stream[i : i + 256] for i in range(0, len(stream), 256)) == [("message", data)]
