"""Frames over one end of a socket pair: a length, then so many bytes. Nobody else can connect to it."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from contextlib import suppress

from fastgen.errors import FastgenError

__all__ = ["MAX_FRAME", "Channel", "ChannelClosedError", "FrameError"]

MAX_FRAME = 2**29
"""Bytes in one frame. The prompt log-probabilities of the longest prompts need the most; a longer one is garbage."""

_LENGTH = struct.Struct("!I")
_READ = 2**16
_TOGETHER = 2**16
"""Frames are written together up to about so many bytes."""


class ChannelClosedError(FastgenError):
    """The other side is gone."""


class FrameError(FastgenError):
    """What came or was to be sent is no frame of ours."""


class Channel:
    """One end. ``send`` never waits: a thread writes, so nobody hangs on a process that does not read. One thread calls
    ``receive``; everything else may be called from any thread, and ``send`` even by a finaliser in the middle of it."""

    def __init__(self, end: socket.socket, *, max_frame: int = MAX_FRAME, name: str = "channel") -> None:
        """``end``: a connected stream socket, the channel's own from here on."""
        end.setblocking(True)
        end.set_inheritable(False)  # a compiler that is started must not keep the connection open
        self._socket = end
        self._max_frame = max_frame
        self._buffer = bytearray()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._broken = False
        self.heard = time.monotonic()
        """When anything came last, part of a frame too, in seconds of the monotonic clock."""
        self._writer = threading.Thread(target=self._write, name=f"fastgen-{name}-writer", daemon=True)
        self._writer.start()

    def send(self, frame: bytes) -> None:
        """Have a frame written. What is sent to somebody who is gone is lost: ``receive`` tells of that.

        Raises:
            FrameError: it is too large.
        """
        if len(frame) > self._max_frame:
            raise FrameError(f"a message of {len(frame):,} bytes is above the limit of {self._max_frame:,}")
        self._queue.put(frame)

    def receive(self) -> bytes:
        """The next frame.

        Raises:
            ChannelClosedError: there is none any more, the other side has closed its end or died.
            FrameError: what came cannot be a frame.
        """
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > self._max_frame:
            raise FrameError(f"a frame of {length:,} bytes is announced, above the limit of {self._max_frame:,}")
        return self._take(length)

    def shut(self) -> None:
        """Let nothing in or out any more: the other side, and a ``receive`` that waits here, find the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, timeout: float = 0.0) -> None:
        """Write what is queued for up to ``timeout`` seconds, then end the connection. Only after the thread that
        receives has ended, or by it. Closing twice is harmless."""
        self._queue.put(None)
        if timeout:
            self._writer.join(timeout)
        self.shut()
        self._writer.join()
        self._socket.close()

    def _take(self, count: int) -> bytes:
        buffer = self._buffer
        while len(buffer) < count:
            try:
                piece = self._socket.recv(max(_READ, count - len(buffer)) if count < 2**24 else _READ * 16)
            except OSError as error:
                raise ChannelClosedError(f"the connection broke: {error.strerror or error}") from None
            if not piece:
                cut = " in the middle of a message" if buffer or count != _LENGTH.size else ""
                raise ChannelClosedError(f"the other side closed the connection{cut}")
            buffer += piece
            self.heard = time.monotonic()
        taken = bytes(memoryview(buffer)[:count])
        del buffer[:count]
        return taken

    def _write(self) -> None:
        while True:
            frame = self._queue.get()
            parts: list[bytes] = []
            size = 0
            while frame is not None:
                parts += (_LENGTH.pack(len(frame)), frame)
                size += len(frame)
                if size >= _TOGETHER:
                    break
                try:
                    frame = self._queue.get_nowait()
                except queue.Empty:
                    break
            if parts and not self._broken:
                try:
                    self._socket.sendall(b"".join(parts))
                except OSError:
                    self._broken = True  # whoever receives hears of it
            if frame is None:
                return
