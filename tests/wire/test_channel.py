"""Frames: whole, in order, bounded; nobody waits for a reader; ends and garbage are told apart."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from fastgen.errors import (
    ConfigError,
    EngineClosedError,
    FastgenError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestFailedError,
)
from fastgen.testing.children import wait_until
from fastgen.types import SamplingParams, StepOutput, TokenLogprob
from fastgen.wire.channel import Channel, ChannelClosedError, FrameError
from fastgen.wire.messages import (
    Beat,
    Output,
    Request,
    Step,
    Submit,
    decode_from_engine,
    decode_from_front,
    encode,
    error_of,
    kind_of,
    params_fields,
)

SECONDS = 20


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    pair = Channel(one), Channel(other)
    yield pair
    for channel in pair:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A bare socket, and a channel at its other end."""
    one, other = socket.socketpair()
    channel = Channel(other, max_frame=1000)
    yield one, channel
    one.close()
    channel.close()


def test_frames_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    frames = [bytes([n % 251]) * (n * 997 % 70_000) for n in range(200)]
    for frame in frames:
        ends[0].send(frame)
    assert [ends[1].receive() for _ in frames] == frames
    ends[1].send(b"back")
    assert ends[0].receive() == b"back"


def test_a_part_of_a_frame_is_a_sign_of_life(raw: tuple[socket.socket, Channel]) -> None:
    end, channel = raw
    seen = [channel.heard]
    reading = threading.Thread(target=channel.receive)
    reading.start()
    for piece in (struct.pack("!I", 6), b"abc", b"def"):
        end.sendall(piece)
        wait_until(lambda: channel.heard > seen[-1])
        seen.append(channel.heard)
    reading.join(SECONDS)
    assert not reading.is_alive()


def test_a_reader_that_does_not_read_holds_nobody_up(ends: tuple[Channel, Channel]) -> None:
    frame = os.urandom(2**20)
    for _ in range(32):  # far more than a socket's buffer takes
        ends[0].send(frame)
    assert all(ends[1].receive() == frame for _ in range(32))


def test_closing_does_not_wait_for_a_reader_that_does_not_read(ends: tuple[Channel, Channel]) -> None:
    for _ in range(32):
        ends[0].send(bytes(2**20))
    ends[0].close()
    assert not any(thread.name == "fastgen-channel-writer" and not thread.daemon for thread in threading.enumerate())


def test_what_was_sent_before_the_end_comes(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(b"last words")
    ends[0].close(SECONDS)
    assert ends[1].receive() == b"last words"
    with pytest.raises(ChannelClosedError, match=r"closed the connection$"):
        ends[1].receive()
    ends[1].send(b"lost")  # nobody hangs, nothing is raised


def test_an_end_in_the_middle_of_a_frame(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall(struct.pack("!I", 10) + b"half")
    raw[0].close()
    with pytest.raises(ChannelClosedError, match="in the middle of a message"):
        raw[1].receive()


def test_a_frame_announced_too_large(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall(b"GET / HTTP/1.1\r\n")
    with pytest.raises(FrameError, match="1,195,725,856 bytes is announced, above the limit of 1,000"):
        raw[1].receive()


def test_a_frame_to_be_sent_too_large(raw: tuple[socket.socket, Channel]) -> None:
    with pytest.raises(FrameError, match="1,001 bytes is above the limit"):
        raw[1].send(bytes(1001))
    raw[1].send(b"fits")
    assert raw[0].recv(100) == struct.pack("!I", 4) + b"fits"


def test_shutting_wakes_who_receives(ends: tuple[Channel, Channel]) -> None:
    came: list[Exception] = []

    def receive() -> None:
        try:
            ends[0].receive()
        except ChannelClosedError as error:
            came.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    ends[0].shut()
    thread.join(SECONDS)
    assert len(came) == 1


def test_outputs_survive_the_wire() -> None:
    entry = TokenLogprob(7, float("-inf"), 3, top=(TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.5, 2)))
    outputs = [
        StepOutput("a", 0, 5),
        StepOutput("a", 1, None, finish_reason="abort"),
        StepOutput("b", 0, 9, entry, "stop", 9, None, 16, [None, entry]),
        StepOutput("c", 2, None, None, "error", None, "it broke"),
    ]
    step = decode_from_engine(encode(Step([Output.of(output) for output in outputs], None, None)))
    assert isinstance(step, Step)
    assert [output.to() for output in step.outputs] == outputs


def test_params_travel_as_what_was_set() -> None:
    params = SamplingParams(
        stop=["a", "b"],
        logit_bias={5: -1.5},
        temperature=0.0,
        seed=2**63 - 1,
        logits_processors={"x": {"k": [1, None]}},
    )
    sent = decode_from_front(encode(Submit(3, [Request("r", [1, 2], params_fields(params), True)])))
    assert isinstance(sent, Submit)
    came = SamplingParams(**sent.requests[0].params)
    assert came == params
    assert came.model_fields_set == params.model_fields_set


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"hello", encode(["Nobody"]), encode(["Beat", "soon"]), encode(Beat(0.0))[:-1]]
)
def test_garbage_is_no_message(frame: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_from_engine(frame)


def test_a_message_of_the_wrong_side_is_garbage() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_from_front(encode(Beat(0.0)))


class Own(ModelNotFoundError):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("no"), ConfigError),
        (Own("no"), ModelNotFoundError),
        (EngineClosedError("no"), EngineClosedError),
        (KeyError("no"), RequestFailedError),
        (FastgenError("no"), FastgenError),
    ],
)
def test_errors_are_of_their_class_again(error: Exception, kind: type[FastgenError]) -> None:
    came = error_of(kind_of(error), "no")
    assert (type(came), str(came)) == (kind, "no")


def test_a_refusal_keeps_its_field() -> None:
    came = error_of("InvalidRequestError", "no", "stop")
    assert isinstance(came, InvalidRequestError)
    assert came.field == "stop"


@pytest.mark.parametrize("kind", ["did_you_mean", "Exception", "__name__", ""])
def test_a_kind_that_is_no_error_of_ours(kind: str) -> None:
    assert type(error_of(kind, "no")) is RequestFailedError
