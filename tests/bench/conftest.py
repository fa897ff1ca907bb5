"""A tiny model, a workload for it, and a server that speaks OpenAI's API."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastgen.bench.drive import Request
from fastgen.bench.protocol import Workload
from fastgen.testing.checkpoints import tiny_llama

Chunks = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]

END = 8  # the tiny model's end-of-sequence id: one that greedy answers hold


@pytest.fixture(scope="session")
def eighteen() -> Workload:
    """More requests than one padded group of transformers' holds, of different lengths."""
    draw = random.Random(0)
    requests = [
        Request([draw.randrange(3, 64) for _ in range(draw.randrange(1, 40))], draw.randrange(1, 12)) for _ in range(18)
    ]
    return Workload("mine", "Mine", requests)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), tokenizer=False, eos_token_id=END)


class FakeServer:
    """Answers with the chunks that ``chunks(body)`` yields, and remembers what it was asked."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks, self.bodies, self.headers = chunks, [], []
        self.running = self.most = 0
        self.status = 200
        self.models: Any = {"data": [{"id": "the-model"}]}
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._whole(json.dumps(fake.models))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.bodies.append(body)
                    fake.headers.append(dict(self.headers))
                    fake.running += 1
                    fake.most = max(fake.most, fake.running)
                try:
                    if fake.status != 200:
                        self._whole('{"error": "the model is busy"}', fake.status)
                        return
                    self.send_response(200)
                    self.end_headers()
                    for chunk in fake.chunks(body):
                        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                    self.wfile.write(b": a comment\n\n")
                finally:
                    with fake.lock:  # before the client can know
                        fake.running -= 1
                self.wfile.write(b"data: [DONE]\n\n")

            def _whole(self, text: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # clients of a failed run leave in the middle
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Chunks], FakeServer]]:
    servers: list[FakeServer] = []

    def start(chunks: Chunks) -> FakeServer:
        servers.append(FakeServer(chunks))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
