"""The whole server in a process of its own: it answers at every door, tells what is wrong, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fastgen.client import Client
from fastgen.errors import CheckpointError, ConfigError, EngineClosedError, FastgenError
from fastgen.server.background import Server, serve
from fastgen.server.ending import MARGIN_SECONDS
from fastgen.testing.children import Holdings, wait_until
from fastgen.testing.scripted_worker import MODULE

SECONDS = 30


def start(model: str, **options: Any) -> Server:
    return serve(model, worker=MODULE, **{"log_level": "warning", **options})


@pytest.fixture(scope="module")
def server(scripted: str) -> Iterator[Server]:
    with start(scripted, grpc_port=0, served_model_name="echo") as made:
        yield made


def engine_of(server: Server) -> psutil.Process:
    (child,) = psutil.Process(server.pid).children()
    return child


def complete(server: Server, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "prompt": prompt, "max_tokens": 100, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)


def generated(server: Server) -> float:
    """Tokens so far."""
    return metric(server, "vllm:generation_tokens_total")


def metric(server: Server, name: str) -> float:
    (value,) = re.findall(rf"^{name}\{{.*\}} (\S+)$", httpx.get(f"{server.url}/metrics").text, re.M)
    return float(value)


def test_it_answers_at_every_door(server: Server) -> None:
    assert complete(server, "over HTTP").json()["choices"][0]["text"] == "over HTTP"
    assert server("through the client").text == "through the client"
    with Client(server.url) as over_http:
        assert over_http("by the other door").text == "by the other door"
    assert [chunk.text for chunk in server.stream("abc")] == ["a", "b", "c"]
    assert server.grpc is not None


def test_it_says_what_it_is(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert [m["id"] for m in httpx.get(f"{server.url}/v1/models").json()["data"]] == ["echo"]
    assert server.model_info().architecture == "Scripted"


def test_the_front_runs_without_torch(server: Server) -> None:
    assert not any("libtorch" in entry.path for entry in psutil.Process(server.pid).memory_maps())


def test_e6_a_dead_engine_shows_and_comes_back(server: Server) -> None:
    came: list[httpx.Response] = []
    prompt = f"SLOW {'x' * 1500}"
    asking = threading.Thread(target=lambda: came.append(complete(server, prompt, max_tokens=len(prompt))))
    before = generated(server)
    asking.start()
    wait_until(lambda: generated(server) > before)  # it runs
    engine_of(server).kill()
    asking.join(SECONDS)
    assert came[0].status_code == 503
    assert "died before the request ended" in came[0].json()["error"]["message"]  # not refused: cut off
    seen = set()

    def back() -> bool:
        seen.add(httpx.get(f"{server.url}/health").status_code)
        return 503 in seen and httpx.get(f"{server.url}/health").status_code == 200

    wait_until(back)
    assert complete(server, "again").json()["choices"][0]["text"] == "again"


# ---- what cannot start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "kind", "words"),
    [
        ("refuses", {}, CheckpointError, "the files of this model are not there"),
        ("leaves", {"max_restarts": 0}, EngineClosedError, "(?s)code 9.*out of memory"),
        ("echo", {"host": "192.0.2.1"}, ConfigError, "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_start_says_why(model: str, options: dict[str, Any], kind: type[FastgenError], words: str) -> None:
    before = Holdings()
    with pytest.raises(kind, match=words):
        start(model, **options)
    assert Holdings() == before


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file.pem").write_text("nothing")
    file = str(tmp_path / "file.pem")
    with pytest.raises(ConfigError, match="tls_cert and tls_key are no certificate and its key"):
        start("echo", tls_cert=file, tls_key=file)


@pytest.mark.parametrize("which", ["port", "grpc_port"])
def test_a_port_that_is_taken(which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"(?s)cannot listen on 127.0.0.1.*{port}"):
            start("echo", **{which: port})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replica": 2}, r"unknown engine or server option 'replica'. Did you mean 'replicas'"),
        ({"replicas": 0}, "replicas"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_options_are_checked_before_anything_starts(options: dict[str, Any], words: str) -> None:
    before = Holdings()
    with pytest.raises(ConfigError, match=words):
        start("echo", **options)
    assert Holdings() == before


# ---- the end ---------------------------------------------------------------------------------------------------------


class Streaming(threading.Thread):
    """A slow stream over HTTP, read to its end."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__()
        self.url = server.url
        self.tokens = tokens
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.start()
        assert self.begun.wait(SECONDS)

    def run(self) -> None:
        body = {"model": "echo", "prompt": "SLOW" + " x" * self.tokens, "max_tokens": self.tokens, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self.begun.set()

    def result(self) -> str:
        """How it ended: the reason of its last chunk, or the code of the error that its last event tells."""
        self.join(SECONDS)
        assert not self.is_alive()
        events = [json.loads(line.removeprefix("data: ")) for line in self.lines if line.startswith("data: {")]
        reasons = [c["finish_reason"] for e in events for c in e.get("choices", []) if c["finish_reason"]]
        if "error" in events[-1]:
            assert not reasons
            return str(events[-1]["error"]["code"])
        assert self.lines[-1] == "data: [DONE]"
        (reason,) = reasons
        return str(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain", "tokens", "end"),
    [(0.0, 1500, "unavailable"), (2.0, 1500, "unavailable"), (20.0, 150, "length")],
    ids=["at once", "cut off", "to its end"],
)
def test_e9_a_signal_lets_a_stream_end_in_order(scripted: str, drain: float, tokens: int, end: str) -> None:
    before = Holdings()
    server = start(scripted, served_model_name="echo", drain_timeout=drain)
    try:
        engine = engine_of(server)
        stream = Streaming(server, tokens)
        os.kill(server.pid, signal.SIGTERM)
        if drain:
            wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
            refused = complete(server, "too late")
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
        assert stream.result() == end
        assert server._child.wait(SECONDS)
        assert server._child.how_it_ended() == "it exited with code 0"
        assert not engine.is_running()
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            one.listen()
    finally:
        server.terminate(SECONDS)
    assert Holdings() == before


@pytest.mark.slow
def test_e9_the_second_signal_is_immediate(scripted: str) -> None:
    server = start(scripted, served_model_name="echo", drain_timeout=600.0)
    try:
        stream = Streaming(server, 1500)
        os.kill(server.pid, signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        os.kill(server.pid, signal.SIGTERM)
        assert server._child.wait(SECONDS)
        assert server._child.how_it_ended() == f"it exited with code {128 + signal.SIGTERM}"
        stream.join(SECONDS)
        assert not stream.is_alive()
    finally:
        server.terminate(SECONDS)


@pytest.mark.slow
def test_e9_the_same_port_serves_again_at_once(scripted: str) -> None:
    port = 0
    for _ in range(3):
        with start(scripted, port=port) as server:
            port = int(server.url.rsplit(":", 1)[1])
            stream = server.stream(f"SLOW {'x' * 1000}")
            next(stream)
            server.terminate(SECONDS)


@pytest.mark.slow
def test_a_server_whose_engines_are_given_up_ends(scripted: str) -> None:
    server = start(scripted, max_restarts=0)
    try:
        engine_of(server).kill()
        assert server._child.wait(SECONDS)
        assert server._child.how_it_ended() == "it exited with code 1"
    finally:
        server.terminate(SECONDS)


@pytest.mark.slow
def test_terminating_twice_and_asking_after(scripted: str) -> None:
    server = start(scripted)
    server.terminate()
    server.terminate()
    with pytest.raises(EngineClosedError):
        server("too late")


@pytest.mark.slow
def test_one_deadline_for_the_whole_end(scripted: str) -> None:
    """The engine is stuck, and clients at both doors wait for it: each phase of the end uses up its time."""
    server = start(scripted, served_model_name="echo", grpc_port=0, drain_timeout=0.0)
    try:
        over_grpc = server.stream(f"SLOW {'x' * 1500}", max_new_tokens=1500)
        next(over_grpc)
        body = json.dumps({"model": "echo", "prompt": "SLEEP", "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            wait_until(lambda: metric(server, "fastgen:requests_in_flight") == 2)
            os.kill(server.pid, signal.SIGTERM)
            assert server._child.wait(MARGIN_SECONDS + 2.0)
            assert server._child.how_it_ended() == "it exited with code 0"
    finally:
        server.terminate(SECONDS)


def test_a_signal_while_it_loads() -> None:
    """`fastgen.serve` has not returned: the process is found by its parent."""
    before = {child.pid for child in psutil.Process().children()}
    errors: list[BaseException] = []

    def starting() -> None:
        try:
            start("loads")
        except FastgenError as error:
            errors.append(error)

    thread = threading.Thread(target=starting)
    thread.start()

    def loading() -> list[psutil.Process]:
        """Servers that have an engine."""
        return [c for c in psutil.Process().children() if c.pid not in before and c.children()]

    wait_until(lambda: bool(loading()))
    (found,) = loading()
    found.send_signal(signal.SIGTERM)
    thread.join(SECONDS)
    (error,) = errors
    assert f"it exited with code {128 + signal.SIGTERM}" in str(error)


CALLER = """
import sys, time
from fastgen.server.background import serve
if __name__ == "__main__":
    server = serve(sys.argv[1], worker=sys.argv[2])
    print(server.pid, flush=True)
    time.sleep(3600)
"""


@pytest.mark.slow
def test_a_caller_that_is_killed_leaves_nothing(scripted: str) -> None:
    caller = subprocess.Popen([sys.executable, "-c", CALLER, scripted, MODULE], stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout is not None
        server = psutil.Process(int(caller.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        assert len(processes) == 2
        caller.kill()
        caller.wait()
        wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
    finally:
        caller.kill()
        caller.wait()
        assert caller.stdout is not None
        caller.stdout.close()


@pytest.mark.thorough
def test_twenty_starts_and_stops_leave_nothing(scripted: str) -> None:
    with start(scripted, grpc_port=0) as server:
        server("once: the gRPC library keeps a thread of its own from its first use on")
    before = Holdings()
    temporary = set(os.listdir("/tmp"))
    for round_ in range(20):
        with start(scripted, grpc_port=0 if round_ % 2 else None) as server:
            assert server(f"round {round_}").text == f"round {round_}"
            if round_ % 3 == 0:
                server.stream(f"SLOW {'x' * 1000}")
    assert Holdings() == before
    assert {name for name in set(os.listdir("/tmp")) - temporary if "fastgen" in name} == set()


# ---- from the shell --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tiny: Path) -> None:
    """A model, a signal, and one line that says where."""
    command = [sys.executable, "-m", "fastgen", "serve", str(tiny), "--port", "0", "--num-blocks", "64"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "FASTGEN_API_KEY": "one, two"}
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.match(r"fastgen: (\S+) is ready on (http://\S+); Ctrl-C ends it$", line):
                break
        else:
            raise AssertionError("it did not say that it is ready")
        assert found[1] == str(tiny)
        with pytest.raises(FastgenError), Client(found[2]) as client:
            client("no key")
        with Client(found[2], api_key="two") as client:
            assert len(client("a key", max_new_tokens=3, ignore_eos=True).token_ids) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.slow
def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tmp_path / "nowhere"), "--offline"], "error: "),
        ([str(tmp_path), "--port", "99999"], "port"),
    ):
        command = [sys.executable, "-m", "fastgen", "serve", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode in (1, 2)
        assert words in result.stderr
        assert "Traceback" not in result.stderr
