"""A peer in a process of its own: what it answers, and everything that such a process can do wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastgen.bench.drive import Request
from fastgen.bench.peers import PeerTarget
from fastgen.bench.protocol import Workload
from fastgen.bench.synthetic import with_clients
from fastgen.errors import ConfigError, EngineClosedError, RequestFailedError

Start = Callable[..., PeerTarget]

WORK = Workload("w", "W", [Request([5, 10], 4), Request([20], 2)])
ANSWERS = [[11, 12, 13, 14], [21, 22]]


def nothing(_: int) -> None:
    """Nobody watches."""


# What it answers


def test_a_run(start: Start) -> None:
    ticks: list[int] = []
    peer = start()
    run = peer.run(WORK, ticks.append)
    assert run.tokens == ANSWERS
    assert [len(line.times) for line in run.lines] == [4, 2]
    assert sum(ticks) == 6
    assert (peer.name, peer.note, peer.versions) == ("a peer", "counts up", {"counter": "1.5"})


def test_runs_follow_one_another_and_keep_the_rule_of_arrivals(start: Start) -> None:
    peer = start(at_step="time.sleep(0.02)")
    assert peer.run(WORK, nothing).tokens == ANSWERS
    one_by_one = peer.run(with_clients(WORK, 1), nothing)
    assert one_by_one.tokens == ANSWERS
    first, second = one_by_one.lines
    assert second.sent == pytest.approx(first.times[-1])
    late = Workload("w", "W", [Request([5], 3), Request([7], 1, after=((0, 2),))])
    first, second = peer.run(late, nothing).lines
    assert first.times[1] <= second.sent < second.times[0]


def test_progress_is_told_while_it_runs(start: Start) -> None:
    ticks: list[tuple[float, int]] = []
    peer = start(at_step="time.sleep(0.3)")
    peer.run(WORK, lambda tokens: ticks.append((time.perf_counter(), tokens)))
    assert sum(tokens for _, tokens in ticks) == 6
    assert len(ticks) > 2


def test_the_other_side_needs_the_standard_library_alone(start: Start) -> None:
    """-I -S: no site-packages, no PYTHON variables, no current folder; and nothing here hides a package's name."""
    seen = "print(sorted(m for m in sys.modules if 'fastgen' in m), sys.path, file=sys.stderr); os._exit(3)"
    python = f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n'
    assert start(python=python).run(WORK, nothing).tokens == ANSWERS
    with pytest.raises(ConfigError) as caught:
        start(python=python, at_load=seen)
    assert "['fastgen_adapter', 'fastgen_drive']" in str(caught.value)
    assert "peers/children" not in str(caught.value).partition("fastgen_drive")[2]


def test_what_it_is_told(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    told = tmp_path / "told.json"
    start(
        at_load=f"import json; json.dump([settings, dict(os.environ)], open({str(told)!r}, 'w'))",
        lines='budget = 12\nmine = "x"\nenv = { COLOUR = "red" }\n',
        threads=3,
    )
    settings, environment = json.loads(told.read_text())
    assert settings == {"model": str(tmp_path), "dtype": "float32", "threads": 3, "budget": 12, "mine": "x"}
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["COLOUR"] == "red"
    assert not {"PYTHONPATH", "OMP_WAIT_POLICY"} & set(environment)


def test_what_libraries_print_is_no_part_of_the_answer(start: Start) -> None:
    noise = "print('loaded'); os.write(1, b'from C\\n'); subprocess.run(['echo', 'from a helper'])"
    peer = start(at_load=noise, at_step="print('stepping')")
    assert peer.run(WORK, nothing).tokens == ANSWERS


# What it can do wrong


def test_an_interpreter_that_cannot_run(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"a peer: cannot start .*program"):
        start(python="\x00\x01 neither a script nor a program")


def test_no_python_at_all(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"a peer .*wrote 'hello' to stdout instead of an answer"):
        start(python="#!/bin/sh\necho hello\n")


def test_a_crash_at_load(start: Start) -> None:
    with pytest.raises(ConfigError) as caught:
        start(at_load="raise ModuleNotFoundError('No module named vllm')")
    message = str(caught.value)
    assert "a peer" in message
    assert "ModuleNotFoundError: No module named vllm" in message
    assert sys.executable in message
    assert "Traceback" in message  # of its stderr
    found = re.search(r"whole: (\S+)\)", message)
    assert found
    assert "Traceback" in Path(found[1]).read_text()  # kept: it tells why


def test_a_death_at_load(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"ended by itself, by SIGKILL. It wrote nothing to stderr."):
        start(at_load="os.kill(os.getpid(), 9)")


def test_a_hang_at_load(start: Start) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="said nothing for 1 s while loading, and was ended"):
        start(at_load="time.sleep(60)", lines="load_seconds = 1\n")
    assert time.monotonic() - began < 50


def test_a_crash_in_a_run_ends_it_for_good(start: Start) -> None:
    peer = start(at_step="1 / 0")
    for _ in range(2):
        with pytest.raises(RequestFailedError, match=r"a peer .*failed: ZeroDivisionError: division by zero"):
            peer.run(WORK, nothing)


def test_a_death_in_a_run(start: Start) -> None:
    peer = start(at_step="print('out of memory', file=sys.stderr); os._exit(7)")
    with pytest.raises(RequestFailedError, match=r"ended by itself, with exit code 7.*\n +out of memory"):
        peer.run(WORK, nothing)


def test_a_hang_in_a_run(start: Start) -> None:
    peer = start(at_step="time.sleep(60)", lines="quiet_seconds = 0.5\n")
    with pytest.raises(RequestFailedError, match=r"said nothing for 0.5 s while running, and was ended"):
        peer.run(WORK, nothing)


def test_slow_is_not_silent(start: Start) -> None:
    """Longer than the limit in all, with tokens on the way."""
    peer = start(at_step="time.sleep(0.5)", lines="quiet_seconds = 1.5\n")
    assert peer.run(WORK, nothing).tokens == ANSWERS


def test_more_tokens_than_asked_for(start: Start) -> None:
    peer = start(at_step="return [(0, [1] * 9)]")
    with pytest.raises(RequestFailedError, match="request 0 got 9 tokens, 4 were asked for"):
        peer.run(WORK, nothing)


def speaker(*answers: Any) -> str:
    """A program that says these lines, one for each that it reads, whatever it reads; then it stays."""
    said = [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
    loop = f"for answer in {said!r}:\n    sys.stdin.readline()\n    print(answer, flush=True)\n"
    return f"#!{sys.executable}\nimport sys, time\n{loop}time.sleep(60)\n"


READY = {"ready": {"versions": {}, "note": ""}}


def line(*times: float, tokens: int | None = None, sent: float = 0.0) -> dict[str, Any]:
    return {"sent": sent, "times": list(times), "tokens": [1] * (len(times) if tokens is None else tokens)}


FINE = [line(1, 2, 3, 4), line(1, 2)]


def test_an_answer_that_is_fine(start: Start) -> None:
    """So that the answers below are refused for what is wrong with them."""
    assert start(python=speaker(READY, {"run": {"lines": FINE}})).run(WORK, nothing).wall == 4
    untold = [line(1, 2, 3, 4, tokens=0), line(1, 2, tokens=0)]
    assert start(python=speaker(READY, {"run": {"lines": untold}})).run(WORK, nothing).tokens == [[], []]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"run": {"lines": [FINE[0], line(1)]}}, "gave 1 token times and 1 tokens for request 1, 2 were asked for"),
        ({"run": {"lines": [line(1, 2, 3, 4, tokens=3), FINE[1]]}}, "gave 4 token times and 3 tokens for request 0"),
        ({"run": {"lines": FINE[:1]}}, "answered 1 requests, 2 were asked"),
        ({"run": {"lines": [FINE[0], line(2, 1)]}}, "request 1 at times that run backwards"),
        ({"run": {"lines": [FINE[0], line(1, 2, sent=1.5)]}}, "request 1 at times that run backwards"),
        ({"run": {"lines": [{"sent": 0}, 3]}}, "in a way that cannot be read"),
        ({"run": None}, "in a way that cannot be read"),
        ("[1, 2]", r"wrote '\[1, 2\]' to stdout"),
        ("loading 50 %", "wrote 'loading 50 %' to stdout"),
        ('{"run": {"lines"', "to stdout instead of an answer"),
    ],
)
def test_answers_that_are_wrong(start: Start, answer: Any, problem: str) -> None:
    with pytest.raises(RequestFailedError, match=f"a peer .*{problem}"):
        start(python=speaker(READY, answer)).run(WORK, nothing)


def test_no_versions(start: Start) -> None:
    with pytest.raises(ConfigError, match="did not say which versions it loaded"):
        start(python=speaker({"ready": {"note": "x"}}))


def test_half_a_line_is_silence(start: Start) -> None:
    python = f"#!{sys.executable}\nimport sys, time\nsys.stdout.write('{{')\nsys.stdout.flush()\ntime.sleep(60)\n"
    with pytest.raises(ConfigError, match="said nothing for 1 s"):
        start(python=python, lines="load_seconds = 1\n")


def test_a_peer_that_reads_nothing_blocks_nobody(start: Start) -> None:
    """More than a pipe holds."""
    much = Workload("w", "W", [Request(list(range(100_000)), 1)])
    peer = start(python=speaker(READY), lines="quiet_seconds = 1\n")
    with pytest.raises(RequestFailedError, match="said nothing for 1 s while running"):
        peer.run(much, nothing)


def test_one_that_failed_leaves_the_others_alone(start: Start) -> None:
    good, bad = start(), start(at_step="os._exit(1)")
    with pytest.raises(RequestFailedError):
        bad.run(WORK, nothing)
    assert good.run(WORK, nothing).tokens == ANSWERS


def test_closing_ends_it_and_what_it_started(start: Start, tmp_path: Path) -> None:
    number = tmp_path / "pid"
    peer = start(at_load=f"open({str(number)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))")
    helper = psutil.Process(int(number.read_text()))
    assert helper.is_running()
    peer.close()
    peer.close()
    assert not list(tmp_path.glob("fastgen-peer-*"))  # nothing failed
    with pytest.raises(EngineClosedError, match="the peer a peer was closed"):
        peer.run(WORK, nothing)
    wait_for_the_end(helper)


def test_a_benchmark_that_is_killed_leaves_no_peer_behind(
    start: Start, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    number = tmp_path / "pid"
    start().close()  # writes peers.toml
    adapter(at_load=f"open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(300)")
    program = (
        "import sys, pathlib; from fastgen.bench.peers import read; from fastgen.bench.protocol import Settings; "
        "read(pathlib.Path(sys.argv[1]))['a peer'](Settings(pathlib.Path()))"
    )
    command = [sys.executable, "-c", program, tmp_path / "peers.toml"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as benchmark:
        until = time.monotonic() + 60
        while not (number.exists() and number.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        peer = psutil.Process(int(number.read_text()))
        benchmark.send_signal(signal.SIGKILL)
    wait_for_the_end(peer)


def wait_for_the_end(process: psutil.Process) -> None:
    until = time.monotonic() + 30
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # nobody may be there to collect it
        assert time.monotonic() < until
        time.sleep(0.05)
