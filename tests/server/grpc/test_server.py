"""The gRPC server, spoken to by grpcio's own client with what the proto file says, and nothing of fastgen's client."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import fastgen
from fastgen.errors import ConfigError
from fastgen.front import Pipeline
from fastgen.server.admission import Admission
from fastgen.server.grpc.server import create_server
from fastgen.server.inprocess import in_process
from fastgen.server.settings import ServerConfig
from fastgen.testing.doors import SCRIPTED, Served, open_door, wait_until
from fastgen.wire import proto
from fastgen.wire.pb import fastgen_pb2 as pb

pytestmark = pytest.mark.slow

SECONDS = 30
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Stub:
    """What protoc's gRPC plugin would generate."""

    def __init__(self, address: str, *, key: str | None = None) -> None:
        self.channel = grpc.insecure_channel(address)
        self._metadata = [] if key is None else [("authorization", key)]
        self._generate = self.channel.unary_unary("/fastgen.v1.Fastgen/Generate")
        self._stream = self.channel.unary_stream("/fastgen.v1.Fastgen/GenerateStream")
        self._info = self.channel.unary_unary("/fastgen.v1.Fastgen/ModelInfo")
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def generate(self, request: pb.GenerateRequest | bytes, *, timeout: float = SECONDS) -> pb.Response:
        return pb.Response.FromString(self._generate(_bytes(request), timeout=timeout, metadata=self._metadata))

    def call(self, request: pb.GenerateRequest | bytes, *, timeout: float = SECONDS) -> Any:
        return self._stream(_bytes(request), timeout=timeout, metadata=self._metadata)

    def stream(self, request: pb.GenerateRequest | bytes) -> list[pb.StreamEvent]:
        return [pb.StreamEvent.FromString(data) for data in self.call(request)]

    def info(self) -> pb.ModelInfoResponse:
        data = self._info(pb.ModelInfoRequest().SerializeToString(), timeout=SECONDS, metadata=self._metadata)
        return pb.ModelInfoResponse.FromString(data)


def _bytes(request: pb.GenerateRequest | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Stub]:
    made = Stub(served.address)
    yield made
    made.channel.close()


def request(text: str = "hello", **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, params=pb.SamplingParams(**{"max_new_tokens": 4, **params}))


def long(text: str = "hello") -> pb.GenerateRequest:
    return request(text, max_new_tokens=400, ignore_eos=True)


def refused(stub: Stub, message: pb.GenerateRequest | bytes) -> grpc.RpcError:
    """The error of the request, the same whole and streamed."""
    with pytest.raises(grpc.RpcError) as whole:
        stub.generate(message)
    with pytest.raises(grpc.RpcError) as streamed:
        stub.stream(message)
    assert whole.value.code() == streamed.value.code()
    assert whole.value.details() == streamed.value.details()
    assert whole.value.trailing_metadata() == streamed.value.trailing_metadata()
    return whole.value


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_text_token_ids_and_chat(stub: Stub, pipe: Pipeline) -> None:
    expected = pipe("hello", max_new_tokens=4)
    answer = stub.generate(request())
    assert list(answer.choices[0].token_ids) == expected.token_ids
    assert (answer.prompt, answer.choices[0].text) == ("hello", expected.text)
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.usage.completion_tokens == 4

    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=b"hello"), params=pb.SamplingParams(max_new_tokens=4))
    assert list(stub.generate(ids).choices[0].token_ids) == expected.token_ids
    assert not stub.generate(ids).HasField("prompt")

    messages = [{"role": "user", "content": "hé"}]
    chat = pb.GenerateRequest(chat=pb.Chat(messages=json.dumps(messages)), params=pb.SamplingParams(max_new_tokens=4))
    assert list(stub.generate(chat).choices[0].token_ids) == pipe.chat(messages, max_new_tokens=4).token_ids


def test_a_stream_says_what_it_made_of_the_prompt_and_adds_up(stub: Stub) -> None:
    message = request(n=2, logprobs=1, prompt_logprobs=1, seed=1, temperature=1.0)
    whole, events = stub.generate(message), stub.stream(message)
    assert [event.WhichOneof("event") for event in events[:2]] == ["prompt", "prompt_logprobs"]
    assert events[0].prompt.n == 2
    assert list(events[0].prompt.token_ids) == list(whole.prompt_token_ids)
    assert events[1].prompt_logprobs == whole.prompt_logprobs
    assert not whole.prompt_logprobs.entries[0].HasField("value")
    chunks = [event.chunk for event in events[2:]]
    for choice in whole.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert [token for chunk in own for token in chunk.token_ids] == list(choice.token_ids)
        assert [chunk.finish_reason for chunk in own][-1] == choice.finish_reason
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("large", [False, True])
def test_large_requests_and_answers_are_dealt_with_in_a_thread(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Not in the event loop, in which all others wait."""
    names: dict[str, list[bool]] = {"parse_request": [], "response_message": [], "event_message": []}

    def spy(name: str) -> None:
        real = getattr(proto, name)

        def called(given: object) -> object:
            names[name].append(threading.current_thread().name == "grpc-door")
            return real(given)

        monkeypatch.setattr(proto, name, called)

    for name in names:
        spy(name)
    if large:
        monkeypatch.setattr("fastgen.server.grpc.service.LARGE_BYTES", 1)
        monkeypatch.setattr("fastgen.server.grpc.service.LARGE_ENTRIES", 0)
    stub.generate(request())
    stub.stream(request())
    assert all(in_loop and (set(in_loop) == {not large}) for in_loop in names.values())


def test_too_many_log_probabilities_of_a_prompt(served: Served, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stub.generate(request(prompt_logprobs=9)).prompt_logprobs.entries
    monkeypatch.setattr("fastgen.server.admission.MOST_PROMPT_LOGPROBS", 49)
    error = refused(stub, request(prompt_logprobs=9))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["fastgen-field"] == "prompt_logprobs"
    assert served.admission.prompt_tokens == 0


def test_model_info(stub: Stub, pipe: Pipeline) -> None:
    info = stub.info()
    assert (info.name, info.max_model_len) == ("tiny", pipe.max_model_len)
    assert not info.HasField("quantization")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words", "field"),
    [
        (pb.GenerateRequest(), "no prompt", "prompt"),
        (request(""), "the prompt is empty", "prompts"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "is empty", "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), r"prompt_token_ids\[0\] is -1", "prompt_token_ids"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**12])), "is 1000000000000", "prompt_token_ids"),
        (request(n=0), "greater than or equal to 1", "n"),
        (request(temperature=float("nan")), "got nan", "temperature"),
        (request(top_p=float("inf")), "top_p", "top_p"),
        (request(max_new_tokens=10_000), "asks for 10000", "max_new_tokens"),
        (request(logit_bias={10**12: 1.0}), "logit_bias names", "logit_bias"),
        (request(stop=[""]), "empty stop string", "stop"),
        (request(lora="nobody"), "nobody", "lora"),
        (request(logits_processors="{"), "must be JSON text", "logits_processors"),
        (request(logits_processors="[1]"), "must be an object", "logits_processors"),
        (request(logits_processors='{"nobody": {}}'), "nobody", "logits_processors"),
        (pb.GenerateRequest(chat=pb.Chat(messages="no")), "messages must be JSON text", "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages="[" * 101 + "]" * 101)), "too deeply", "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages="[" * 99_999)), "must be JSON text", "messages"),
        (request(logits_processors='{"a": 1e999}'), "too large", "logits_processors"),
        (pb.GenerateRequest(chat=pb.Chat(messages="[]")), "messages is empty", "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages='[{"role": "a", "role": "b"}]')), "comes twice", "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages='[{"role": NaN}]')), "NaN is no number in JSON", "messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages='[{"role": "user"}]', template="{{ 1 }}")), "name", "template"),
        (b"\x12\x02\xff\xff", "not a valid", None),  # text that is no UTF-8
        (b"\xff", "not a valid", None),
        (request().SerializeToString() + b"\x98\x06\x01", "number 99", "GenerateRequest"),
        (pb.GenerateRequest(text="a").SerializeToString() + b"\x2a\x03\x98\x06\x01", "number 99", "SamplingParams"),
    ],
)
def test_bad_requests_are_invalid_arguments_naming_the_field(
    stub: Stub, message: pb.GenerateRequest | bytes, words: str, field: str | None
) -> None:
    error = refused(stub, message)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert re.search(words, error.details())
    assert dict(error.trailing_metadata()).get("fastgen-field") == field


def test_a_long_value_does_not_break_the_error(stub: Stub) -> None:
    error = refused(stub, request(lora="é" * 20_000))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "lora names the adapter" in error.details()


def test_an_unknown_model(stub: Stub) -> None:
    error = refused(stub, pb.GenerateRequest(text="a", model="tony"))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "Did you mean 'tiny'?" in error.details()
    assert stub.generate(pb.GenerateRequest(text="a", model="tiny", params=pb.SamplingParams(max_new_tokens=1)))


def test_a_message_above_the_limit(pipe: Pipeline) -> None:
    with open_door(pipe, "grpc", max_request_size="10KB") as served:
        stub = Stub(served.address)
        error = refused(stub, request("a" * 11_000))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry-after" not in dict(error.trailing_metadata())
        assert stub.generate(request("a" * 100)).usage.prompt_tokens == 100
        stub.channel.close()


def test_mutated_messages_get_an_answer_or_a_refusal(endless: Pipeline) -> None:
    engine: Any = endless.engine
    engine.on_step = lambda: None
    engine.script = lambda prompt, index: prompt[:3] or [97]
    whole = pb.GenerateRequest(
        text="héllo",
        params=pb.SamplingParams(n=2, max_new_tokens=5, stop=["x"], logit_bias={1: 2.0}, logprobs=1, seed=3),
    ).SerializeToString()
    chance = random.Random(5)
    codes: Counter[grpc.StatusCode] = Counter()
    with open_door(endless, "grpc", info=SCRIPTED, max_sequences=1_000) as served:
        stub = Stub(served.address)
        for _ in range(400):
            message = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                place = chance.randrange(len(message) + 1)
                message[place : place + chance.randint(0, 2)] = chance.randbytes(chance.randint(0, 2))
            try:
                if chance.random() < 0.5:
                    stub.generate(bytes(message))
                else:
                    assert stub.stream(bytes(message))[-1].chunk.HasField("usage")
                codes[grpc.StatusCode.OK] += 1
            except grpc.RpcError as error:
                codes[error.code()] += 1
        assert set(codes) <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }, codes
        assert codes[grpc.StatusCode.OK] > 20
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > 20
        assert served.idle()
        stub.channel.close()


def test_an_unknown_method(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.channel.unary_unary("/fastgen.v1.Fastgen/Nothing")(b"", timeout=SECONDS)
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_what_nobody_foresaw_is_internal_and_says_nothing_of_the_inside(
    served: Served, stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret of the inside")

    monkeypatch.setattr("fastgen.server.native.completion_call", broken)
    error = refused(stub, request())
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()
    assert "secret of the inside" in caplog.text
    monkeypatch.undo()
    assert stub.generate(request()).usage.completion_tokens == 4
    assert served.idle()


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_api_keys(pipe: Pipeline) -> None:
    with open_door(pipe, "grpc", api_key=("first", "second")) as served:
        for key in ("Bearer first", "bearer second"):
            stub = Stub(served.address, key=key)
            assert stub.generate(request()).usage.completion_tokens == 4
            assert stub.info().name == "tiny"
            stub.channel.close()
        for bad in (None, "Bearer third", "Bearer ", "first", "Basic first", "Bearer firs", "Bearer first second"):
            stub = Stub(served.address, key=bad)
            error = refused(stub, request())
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED, bad
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                stub.info()
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                ProtoReflectionDescriptorDatabase(stub.channel).get_services()
            assert stub.health.Check(health_pb2.HealthCheckRequest()).status == SERVING  # probes have no key
            stub.channel.close()
        assert served.idle()


# ---- deadlines and cancellation --------------------------------------------------------------------------------------


def test_a_deadline_ends_the_request(served: Served, stub: Stub) -> None:
    for run in (stub.generate, lambda message, timeout: list(stub.call(message, timeout=timeout))):
        with pytest.raises(grpc.RpcError) as error:
            run(long(), timeout=0.05)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(served.idle)
    steps = served.pipe.stats().passes
    assert stub.generate(request()).usage.completion_tokens == 4
    assert served.pipe.stats().passes - steps < 50  # the ends were early ones


def test_cancelling_ends_the_request(served: Served, stub: Stub) -> None:
    call = stub.call(long())
    assert pb.StreamEvent.FromString(next(call)).HasField("prompt")
    assert not served.idle()
    call.cancel()
    wait_until(served.idle)

    whole = stub._generate.future(long().SerializeToString())
    wait_until(lambda: not served.idle())
    whole.cancel()
    wait_until(served.idle)


def test_a_client_whose_connection_goes_ends_its_requests(served: Served) -> None:
    stub = Stub(served.address)
    calls = [stub.call(long()) for _ in range(3)]
    for call in calls:
        next(call)
    assert not served.idle()
    stub.channel.close()
    wait_until(served.idle)


# ---- overload --------------------------------------------------------------------------------------------------------


def test_overload_is_refused_at_once_with_a_time_to_come_back(pipe: Pipeline) -> None:
    with open_door(pipe, "grpc", max_sequences=1, max_queue=1) as served:
        stub = Stub(served.address)
        calls = [stub.call(long()) for _ in range(2)]
        next(calls[0])
        wait_until(lambda: served.admission.choices == 2)
        error = refused(stub, request())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1
        error = refused(stub, request(n=3))  # never
        assert (error.code(), dict(error.trailing_metadata())["fastgen-field"]) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "n",
        )
        for call in calls:
            call.cancel()
        wait_until(served.idle)
        assert stub.generate(request()).usage.completion_tokens == 4
        stub.channel.close()


def test_prompt_tokens_are_limited_too(pipe: Pipeline) -> None:
    with open_door(pipe, "grpc", max_waiting_tokens=100) as served:
        stub = Stub(served.address)
        call = stub.call(long("a" * 60))
        next(call)
        error = refused(stub, request("a" * 60))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        stub.channel.close()


# ---- health and shutdown ---------------------------------------------------------------------------------------------


def test_health_follows_the_engine(pipe: Pipeline) -> None:
    with open_door(pipe, "grpc") as served:
        stub = Stub(served.address)
        seen: list[int] = []
        watch = stub.health.Watch(health_pb2.HealthCheckRequest(service="fastgen.v1.Fastgen"))
        watcher = threading.Thread(target=lambda: _collect(watch, seen))
        watcher.start()
        wait_until(lambda: seen == [SERVING])
        for service in ("", "fastgen.v1.Fastgen"):
            assert stub.health.Check(health_pb2.HealthCheckRequest(service=service)).status == SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            stub.health.Check(health_pb2.HealthCheckRequest(service="nobody"))

        served.backend.starting = True
        assert stub.health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
        wait_until(lambda: seen == [SERVING, NOT_SERVING])
        error = refused(stub, request())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "retry-after" in dict(error.trailing_metadata())

        served.backend.starting = False
        wait_until(lambda: seen == [SERVING, NOT_SERVING, SERVING])
        assert stub.generate(request()).usage.completion_tokens == 4

        served.admission.drain()
        assert stub.health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
        error = refused(stub, request())
        assert (error.code(), "shutting down" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)
        wait_until(lambda: seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING])
        assert served.idle()
        watch.cancel()
        watcher.join(SECONDS)
        assert not watcher.is_alive()
        stub.channel.close()


def _collect(watch: Any, seen: list[int]) -> None:
    try:
        seen.extend(answer.status for answer in watch)
    except grpc.RpcError:
        return


def test_an_engine_that_goes_ends_its_calls(tiny: Path) -> None:
    pipe = fastgen.pipeline(tiny, num_blocks=64)
    with open_door(pipe, "grpc") as served:
        stub = Stub(served.address)
        call = stub.call(long())
        next(call)
        pipe.close()
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "retry-after" not in dict(error.value.trailing_metadata())  # it had begun
        assert refused(stub, request()).code() == grpc.StatusCode.UNAVAILABLE
        assert stub.health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING
        assert not served.admission.choices
        stub.channel.close()


def test_stopping_lets_calls_end_within_the_grace_and_frees_the_port(endless: Pipeline) -> None:
    async def run() -> None:
        service = in_process(endless, ServerConfig(grpc_port=0), info=SCRIPTED)
        server = create_server(service, Admission(service.settings, 8))
        port = await server.start()
        taken = in_process(endless, ServerConfig(grpc_port=port), info=SCRIPTED)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await create_server(taken, Admission(taken.settings, 8)).start()

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            generate = channel.unary_stream("/fastgen.v1.Fastgen/GenerateStream")
            quick = aiter(generate(_bytes(request("a", max_new_tokens=20))))
            slow = aiter(generate(_bytes(request("a", max_new_tokens=9_000))))
            await anext(quick)  # both have begun
            await anext(slow)
            stopping = asyncio.create_task(server.stop(2.0))
            events = [pb.StreamEvent.FromString(data) async for data in quick]
            assert events[-1].chunk.HasField("usage")
            await stopping
            with pytest.raises(grpc.aio.AioRpcError):
                [data async for data in slow]
        again = create_server(taken, Admission(taken.settings, 8))
        assert await again.start() == port
        await again.stop(0)
        await again.stop(0)

    asyncio.run(run())
    aborted = endless.engine.aborted  # type: ignore[attr-defined]
    wait_until(lambda: len(aborted) == 1)


def test_reflection_lists_and_describes_the_services(stub: Stub) -> None:
    database = ProtoReflectionDescriptorDatabase(stub.channel)
    assert {"fastgen.v1.Fastgen", "grpc.health.v1.Health"} <= set(database.get_services())
    service = descriptor_pool.DescriptorPool(database).FindServiceByName("fastgen.v1.Fastgen")
    assert {method.name for method in service.methods} == {"Generate", "GenerateStream", "ModelInfo"}


def test_many_calls_at_once(served: Served, stub: Stub, pipe: Pipeline) -> None:
    expected = {text: pipe(text, max_new_tokens=4).token_ids for text in ("a", "bc", "def")}
    requests = [(text, request(text)) for text in expected] * 2
    calls = [(text, stub._generate.future(message.SerializeToString(), timeout=SECONDS)) for text, message in requests]
    for text, call in calls:
        assert list(pb.Response.FromString(call.result()).choices[0].token_ids) == expected[text]
    assert served.idle()
