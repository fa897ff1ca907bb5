"""What the live view shows: one snapshot at a time, made while somebody looks, the same for everyone who does."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastgen.server.observe import Observed
from fastgen.server.service import Replica, Service
from fastgen.server.tally import Histogram
from fastgen.wire.info import Pass

__all__ = ["Live"]

logger = logging.getLogger(__name__)

SECONDS = 0.25
"""Between two snapshots."""
VIEWERS = 64
HISTORY_SECONDS, HISTORY_BARS = 30.0, 240
"""What a new viewer is shown of the passes before."""
BARS = 48
"""Most bars of a replica in one snapshot: more passes than that are drawn together."""
RATE_SECONDS = 5.0
SHARES = (0.5, 0.95, 0.99)


class Live:
    """Snapshots as server-sent events."""

    def __init__(self, service: Service, observed: Observed) -> None:
        self._service = service
        self._observed = observed
        self._viewers = 0
        self._ticker: asyncio.Task[None] | None = None
        self._events: deque[tuple[int, bytes]] = deque(maxlen=8)  # what a viewer who is late may still read
        self._made = 0
        self._fresh = asyncio.Event()
        # Each pass is shown once: what ended before these times is in the snapshots made so far or came before them.
        self._start = 0.0
        self._shown: dict[int, float] = {}  # of each replica, in the snapshot that is being made
        self._sent: dict[int, float] = {}  # in the last one of `_events`

    @property
    def full(self) -> bool:
        return self._viewers >= VIEWERS

    @property
    def closed(self) -> bool:
        """Whether the server is going: an open stream would keep it."""
        return self._service.backend.state == "draining"

    async def events(self) -> AsyncIterator[bytes]:
        """For one viewer: ``hello``, then a ``frame`` for each snapshot, until the server goes."""
        self._viewers += 1
        try:
            if self._ticker is None or self._ticker.done():
                self._fresh = asyncio.Event()
                self._start, self._shown, self._sent = time.time(), {}, {}
                self._ticker = asyncio.create_task(self._tick(), name="fastgen-live")
            ticker, seen = self._ticker, self._made
            yield _event("hello", await asyncio.to_thread(self._hello, self._start, self._sent))
            while not ticker.done():
                await self._fresh.wait()
                for number, event in list(self._events):
                    if number > seen:
                        seen = number
                        yield event
        finally:
            self._viewers -= 1
            if not self._viewers and self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None

    async def _tick(self) -> None:
        try:
            while not self.closed:
                start = time.monotonic()
                frame = await asyncio.to_thread(self._frame)
                self._made += 1
                self._sent = dict(self._shown)
                self._events.append((self._made, _event("frame", frame)))
                self._wake()
                await asyncio.sleep(max(SECONDS - (time.monotonic() - start), SECONDS / 4))
        except Exception:
            logger.exception("the live view stopped")
        finally:
            with suppress(RuntimeError):  # the event loop is closed
                asyncio.get_running_loop().call_soon(self._wake)  # once this task is done

    def _wake(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    # ---- snapshots, in a thread: asking an engine for its counts may take as long as a pass ------------------------

    def _hello(self, start: float, sent: Mapping[int, float]) -> dict[str, Any]:
        info, since = self._service.info, time.time() - HISTORY_SECONDS
        history = []
        for one in self._service.backend.replicas():
            until = sent.get(one.index, start)
            passes = [each for each in self._observed.passes(one.index) if since < each.ended <= until]
            history += _bars(one.index, passes, HISTORY_BARS)
        return {
            "now": time.time(),
            "names": list(self._service.names),
            "version": info.version,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "quantization": info.quantization,
            "max_model_len": info.max_model_len,
            "budget": info.max_batch_tokens,
            "max_sequences": info.max_sequences,
            "history": history,
        }

    def _frame(self) -> dict[str, Any]:
        replicas = self._service.backend.replicas()
        late, lately = self._observed.recent(), self._observed.recent(RATE_SECONDS)
        rows = [_row(one, self._observed.passes(one.index)[-1:], self._service.info.total_blocks) for one in replicas]
        return {
            "now": time.time(),
            "state": self._service.backend.state,
            "in_flight": self._observed.in_flight,
            **{key: sum(row[key] for row in rows) for key in ("running", "waiting", "used", "cached", "total")},
            "passes": [bar for one in replicas for bar in self._new_passes(one.index)],
            "rates": {
                "prompt": lately.prompt_tokens / lately.seconds,
                "answer": lately.answer_tokens / lately.seconds,
                "ended": lately.ended / lately.seconds,
            },
            "latency": {
                "seconds": late.seconds,
                "first": _percentiles(late.first_token),
                "gap": _percentiles(late.gap),
                "whole": _percentiles(late.whole),
            },
            "replicas": rows,
        }

    def _new_passes(self, replica: int) -> list[list[float]]:
        passes = self._observed.passes(replica)
        since = self._shown.get(replica, self._start)
        new = [one for one in passes if one.ended > since]
        if new:
            self._shown[replica] = new[-1].ended
        return _bars(replica, new, BARS)


def _bars(replica: int, passes: Sequence[Pass], most: int) -> list[list[float]]:
    """``[replica, end, seconds, most tokens, mean tokens, passes]`` for each bar: one pass, or several in a row."""
    together = -(-len(passes) // most) or 1
    bars = []
    for at in range(0, len(passes), together):
        few = passes[at : at + together]
        tokens = [one.tokens for one in few]
        seconds = sum(one.seconds for one in few)
        bars.append(
            [replica, round(few[-1].ended, 4), round(seconds, 5), max(tokens), sum(tokens) / len(few), len(few)]
        )
    return bars


def _row(one: Replica, last: Sequence[Pass], total_blocks: int) -> dict[str, Any]:
    """``last``: its last pass, for engines in the middle of one so long that they do not answer."""
    now = one.stats or (last[0] if last else None)
    return {
        "index": one.index,
        "state": one.state,
        "restarts": one.restarts,
        "outstanding": one.outstanding_tokens,
        "detail": one.detail,
        "running": now.running if now else 0,
        "waiting": now.waiting if now else 0,
        "used": now.used_blocks if now else 0,
        "cached": now.cached_blocks if now else 0,
        "total": one.stats.total_blocks if one.stats else total_blocks if last else 0,
        "passes": one.stats.passes if one.stats else None,
    }


def _percentiles(histogram: Histogram) -> dict[str, float | None]:
    values = {f"p{share * 100:g}": histogram.percentile(share) for share in SHARES}
    return {**values, "count": histogram.count}


def _event(kind: str, content: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n".encode()
