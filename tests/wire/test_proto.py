"""``fastgen.proto``: complete, generated from what lies beside it, and carried whole both ways."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from fastgen.errors import InvalidRequestError
from fastgen.types import Chunk, Completion, FinishReason, Response, SamplingParams, TokenLogprob, Usage
from fastgen.wire import documents, proto
from fastgen.wire.info import ModelInfo
from fastgen.wire.pb import fastgen_pb2 as pb
from fastgen.wire.requests import ChatPrompt, GenerateRequest, PromptLogprobs, StreamStart

WHOLE: dict[str, Any] = {
    "n": 3,
    "max_new_tokens": 7,
    "min_new_tokens": 0,
    "temperature": 0.3,
    "top_k": -1,
    "top_p": 0.0,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 0.0,
    "logit_bias": {5: -100.0, 3: 0.5},
    "seed": 2**63 - 1,
    "stop": ("é", "b"),
    "stop_token_ids": (0, 7),
    "include_stop": False,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "logprobs": 0,
    "prompt_logprobs": 5,
    "logits_processors": {"second": {"a": [1, 2.5, None, "é"]}, "first": {}},
    "priority": -3,
    "cache_salt": "tenant",
    "lora": "polite",
}
"""A value for each field, none its default. (max_length: alone, since max_new_tokens excludes it.)"""


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_generated_code_is_of_the_file(tmp_path: Path, repository: Path) -> None:
    """What the file describes now, by today's compiler, equals what the checked-in module says."""
    wire = repository / "fastgen" / "wire"
    out = tmp_path / "set"
    arguments = [
        "protoc",
        f"--proto_path=fastgen/wire/pb={wire}",
        f"--descriptor_set_out={out}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        "fastgen/wire/pb/fastgen.proto",
    ]
    assert protoc.main(arguments) == 0
    (now,) = FileDescriptorSet.FromString(out.read_bytes()).file
    checked_in = FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    now.ClearField("source_code_info")
    for message in now.message_type:  # protoc spells out names that the module leaves to be derived
        for part in [message, *message.nested_type]:
            for one in part.field:
                one.ClearField("json_name")
    assert checked_in == now
    stub = (wire / "pb" / "fastgen_pb2.pyi").read_text()
    assert _declared(stub) == _declared((tmp_path / "fastgen/wire/pb/fastgen_pb2.pyi").read_text())


def _declared(stub: str) -> list[str]:
    """Classes and their fields; compilers differ in how they write imports and optional arguments."""
    return [line for line in stub.splitlines() if line.startswith("class ") or "__slots__" in line]


def test_every_sampling_parameter_has_its_field() -> None:
    described = pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(described) == set(SamplingParams.model_fields)
    for name, field in described.items():
        assert field.has_presence or field.is_repeated, f"{name}: unset and zero must differ"


@pytest.mark.parametrize(
    ("kind", "message", "renamed"),
    [
        (Response, pb.Response, {}),
        (Completion, pb.Completion, {"stop": {"stop_string", "stop_token_id"}}),
        (Chunk, pb.Chunk, {"stop": {"stop_string", "stop_token_id"}}),
        (TokenLogprob, pb.TokenLogprob, {}),
        (Usage, pb.Usage, {}),
        (ModelInfo, pb.ModelInfoResponse, {}),
        (ChatPrompt, pb.Chat, {}),
    ],
)
def test_every_field_of_an_answer_has_its_own(kind: Any, message: Any, renamed: dict[str, set[str]]) -> None:
    expected: set[str] = set()
    for field in fields(kind):
        expected |= renamed.get(field.name, {field.name})
    assert set(message.DESCRIPTOR.fields_by_name) == expected


def test_every_finish_reason_has_its_number() -> None:
    names = {value.name for value in pb.DESCRIPTOR.enum_types_by_name["FinishReason"].values if value.number}
    assert names == {f"FINISH_REASON_{reason.upper()}" for reason in get_args(FinishReason)}


# ---- sampling parameters ---------------------------------------------------------------------------------------------


def test_whole_is_whole() -> None:
    assert set(WHOLE) | {"max_length"} == set(SamplingParams.model_fields)
    for name, value in WHOLE.items():
        if name not in ("include_stop", "frequency_penalty", "min_new_tokens"):
            assert value != SamplingParams.model_fields[name].default


@pytest.mark.parametrize("name", [*WHOLE, "max_length"])
def test_each_parameter_alone(name: str) -> None:
    params = SamplingParams(**{name: WHOLE.get(name, 9)})
    message = proto.params_message(params)
    assert [field.name for field, _ in message.ListFields()] == [name]
    back = proto.params(message)
    assert back == params
    assert back.model_fields_set == {name}


def test_all_parameters_and_none() -> None:
    for params in (SamplingParams(**WHOLE), SamplingParams()):
        back = proto.params(pb.SamplingParams.FromString(proto.params_message(params).SerializeToString()))
        assert back == params
        assert back.model_fields_set == params.model_fields_set
    processors = proto.params(proto.params_message(SamplingParams(**WHOLE))).logits_processors
    assert processors is not None
    assert list(processors) == ["second", "first"]  # they run in this order


@pytest.mark.parametrize(
    "bad",
    [
        {"logits_processors": {"a": object()}},
        {"logits_processors": {"a": {"b": math.nan}}},
        {"stop": "\ud800"},
        {"cache_salt": "\udc00"},
        {"priority": 2**70},
        {"logit_bias": {2**70: 1.0}},
        {"stop_token_ids": (2**70,)},
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(InvalidRequestError, match=name) as error:
        proto.params_message(SamplingParams(**bad))
    assert error.value.field == name


# ---- requests --------------------------------------------------------------------------------------------------------

REQUESTS = [
    GenerateRequest("hé", SamplingParams(**WHOLE), "polite"),
    GenerateRequest(""),
    GenerateRequest([0, 5, -1, 2**40]),
    GenerateRequest([]),
    GenerateRequest(ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "\u2028"}]}])),
    GenerateRequest(
        ChatPrompt(
            [{"role": "user", "content": None}],
            tools=[{"type": "function"}],
            template="tool_use",
            template_variables={"enable_thinking": False},
            add_generation_prompt=False,
            continue_final_message=True,
        )
    ),
    GenerateRequest(ChatPrompt([{"role": "user"}], tools=[], template_variables={})),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests(request_: GenerateRequest) -> None:
    back = proto.parse_request(proto.request_message(request_).SerializeToString())
    assert back == request_
    assert back.params.model_fields_set == request_.params.model_fields_set


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest([2**70]), "prompt_token_ids"),
        (GenerateRequest("\ud800"), "prompt"),
        (GenerateRequest("a", model="\ud800"), "model"),
        (GenerateRequest(ChatPrompt([{"role": "user", "content": object()}])), "messages"),
        (GenerateRequest(ChatPrompt([{"role": "user", "content": "\ud800"}])), "messages"),
        (GenerateRequest(ChatPrompt([{"role": "user"}], tools=[object()])), "tools"),
        (GenerateRequest(ChatPrompt([{"role": "user"}], template_variables={"a": math.inf})), "template_variables"),
    ],
)
def test_requests_that_cannot_be_sent_are_refused_by_name(request_: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        proto.request_message(request_)
    assert error.value.field == field


# ---- answers, as messages and as JSON --------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
ids = st.lists(st.integers(0, 2**31), max_size=3)
stops = st.none() | text | st.integers(0, 2**31)
scores = st.floats(max_value=0.0, allow_nan=False) | st.just(-math.inf)
best = st.builds(TokenLogprob, st.integers(0, 10), scores, st.integers(1, 10), text)
logprobs = st.builds(
    TokenLogprob, st.integers(0, 10), scores, st.integers(1, 10), text, st.lists(best, max_size=2).map(tuple)
)
entries = st.none() | st.lists(logprobs, max_size=2)
prompt_entries = st.none() | st.lists(st.none() | logprobs, max_size=3)
reasons = st.sampled_from(get_args(FinishReason))
usages = st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
completions = st.builds(Completion, st.integers(0, 3), text, ids, reasons, stops, entries, st.none() | text)
responses = st.builds(
    Response, text, ids, st.lists(completions, min_size=1, max_size=3), usages, st.none() | text, prompt_entries
)
chunks = st.builds(
    Chunk,
    text,
    st.integers(0, 3),
    text,
    ids,
    entries,
    st.none() | reasons,
    stops,
    st.none() | text,
    st.none() | usages,
)
starts = st.builds(StreamStart, text, ids, st.none() | text, st.integers(1, 9))
events = chunks | starts | st.builds(PromptLogprobs, st.lists(st.none() | logprobs, max_size=3))


@given(responses)
def test_responses(response: Response) -> None:
    assert proto.response(pb.Response.FromString(proto.response_message(response).SerializeToString())) == response
    assert documents.read_response(documents.encode(response)) == response


@given(events)
def test_events(event: Any) -> None:
    assert proto.event(pb.StreamEvent.FromString(proto.event_message(event).SerializeToString())) == event
    assert documents.read_event(documents.encode(event)) == event


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_model_info(quantization: str | None) -> None:
    info = ModelInfo("m", "A", "float32", "cpu", quantization, 1, 2, 3, 4, 5, 6, ("a", "b"), "0.1")
    assert proto.model_info(proto.model_info_message(info)) == info
    assert documents.read_model_info(documents.encode(info)) == info


def test_minus_infinity_is_null_in_json() -> None:
    event = PromptLogprobs([None, TokenLogprob(1, -math.inf, 2, "a", (TokenLogprob(2, -0.5, 1, "b"),))])
    written = documents.encode(event)
    assert b'"logprob":null' in written
    assert b"nfinity" not in written
    assert documents.read_event(written) == event


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"request_id": "a"}', b"null", b"\xff"])
def test_json_that_is_no_answer(data: bytes) -> None:
    for read in (documents.read_response, documents.read_event, documents.read_model_info):
        with pytest.raises(ValueError, match=r"."):
            read(data)


def test_a_plugins_error_may_say_anything() -> None:
    choice = Completion(0, "", [], "error", error="broken \ud800")
    response = Response("r", [], [choice], Usage(0, 0))
    for back in (
        proto.response(proto.response_message(response)),
        documents.read_response(documents.encode(response)),
    ):
        assert back.error == "broken ?"
    chunk = Chunk("r", 0, "", error="\ud800")
    assert documents.read_event(documents.encode(chunk)) == Chunk("r", 0, "", error="?")


def test_no_torch() -> None:
    import subprocess

    code = "import sys; from fastgen.wire import proto, documents; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
