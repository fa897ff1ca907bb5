"""Models by name: the hub's own client library, talking to a small hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from fastgen.config import EngineConfig
from fastgen.core import hub
from fastgen.core.blueprint import draw
from fastgen.core.source import ModelFiles, resolve
from fastgen.errors import CheckpointError, ConfigError, FastgenError, ModelNotFoundError, UnsupportedModelError
from fastgen.testing.adapters import random_lora
from fastgen.testing.checkpoints import tiny_llama

pytestmark = pytest.mark.slow


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b'{"b": 1}',
    "generation_config.json": b'{"c": 1}',
    "README.md": b"hello",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"onnx",
}
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}


@dataclass
class FakeHub:
    """What is on it, what was asked, and how it misbehaves."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    error: tuple[int, str] | None = None
    needs_token: str | None = None

    def sent(self) -> set[str]:
        """Files whose content was fetched."""
        asked = [unquote(line) for line in self.requests if line.startswith("GET /o/m/r")]
        return {line.split("/resolve/")[1].partition("/")[2] for line in asked}

    def answer(self, method: str, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(f"{method} {path}")
        path = unquote(path.partition("?")[0])
        if self.error is not None:
            return self.error[0], {"X-Error-Code": self.error[1]}, b""
        if self.needs_token is not None and token != f"Bearer {self.needs_token}":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = next((n for n in self.repositories if path.startswith((f"/api/models/{n}", f"/{n}/"))), None)
        if name is None:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        files = self.repositories[name]
        if "/resolve/" in path:
            content = files[path.split("/resolve/")[1].partition("/")[2]]
            etag = hashlib.sha1(content).hexdigest()
            return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}, content
        if "/tree/" in path:
            tree = [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files.items()]
            return 200, {}, json.dumps(tree).encode()
        if path.endswith(("/revision/main", "/revision/v1", f"/revision/{COMMIT}")) or path == f"/api/models/{name}":
            siblings = [{"rfilename": p} for p in files]
            return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    state = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            status, headers, body = state.answer(self.command, self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for header, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = respond

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.chdir(tmp_path)
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(fake_hub: FakeHub) -> FakeHub:
    fake_hub.repositories["o/m"] = {**SMALL, "model.safetensors": b"weights", "pytorch_model.bin": b"pickle"}
    return fake_hub


def whole(name: str = "o/m", **options: Any) -> ModelFiles:
    files = resolve(name, **options)
    files.fetch_weights()
    return files


def refused(match: str, error: type[FastgenError] = ModelNotFoundError, name: str = "o/m", **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        whole(name, **options)
    assert "\n" not in str(caught.value)


# ---- what is fetched ----------------------------------------------------------------------------------------------


def test_fetches_what_is_needed_and_no_more(model: FakeHub) -> None:
    files = whole()
    assert (files.name, files.origin, files.revision) == ("o/m", "hub", COMMIT)
    assert model.sent() == {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors"}
    assert (files.directory / "model.safetensors").read_bytes() == b"weights"


def test_the_weights_come_when_asked_for(model: FakeHub) -> None:
    files = resolve("o/m")
    assert model.sent() == {"config.json", "tokenizer.json", "generation_config.json"}
    model.requests.clear()
    files.fetch_weights()
    assert model.sent() == {"model.safetensors"}
    model.requests.clear()
    files.fetch_weights()
    assert model.requests == []


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, UnsupportedModelError),
        ({}, UnsupportedModelError),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": "many"}, ConfigError),
    ],
)
def test_a_model_that_cannot_be_served_is_not_downloaded(
    model: FakeHub, config: dict[str, Any], error: type[FastgenError]
) -> None:
    model.repositories["o/m"]["config.json"] = json.dumps(config).encode()
    with pytest.raises(error):
        draw("o/m", EngineConfig())
    assert model.sent() == {"config.json", "tokenizer.json", "generation_config.json"}


def test_weights_are_those_of_the_config(model: FakeHub) -> None:
    """The branch may move between the two: the commit is asked for, not the branch."""
    files = resolve("o/m", revision="v1")
    model.requests.clear()
    files.fetch_weights()
    assert model.sent() == {"model.safetensors"}
    assert any(f"/resolve/{COMMIT}/" in line for line in model.requests)
    assert not [line for line in model.requests if "v1" in line or "main" in line]


def test_names_in_an_index_are_no_patterns(fake_hub: FakeHub) -> None:
    index = {"weight_map": {"a": "*.safetensors", "b": "m[12].safetensors"}}
    meant = {name: name.encode() for name in index["weight_map"].values()}
    others = dict.fromkeys(["consolidated.safetensors", "m1.safetensors", "fp32/m.safetensors"], b"large")
    indexed = {**SMALL, "model.safetensors.index.json": json.dumps(index).encode()}
    fake_hub.repositories["o/m"] = {**indexed, **meant, **others}
    whole()
    assert {name for name in fake_hub.sent() if name.endswith(".safetensors")} == set(meant)


def test_nothing_large_is_fetched_of_a_model_that_lacks_a_shard(fake_hub: FakeHub) -> None:
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    fake_hub.repositories["o/m"] = {**SMALL, **index, "model-00001-of-00002.safetensors": b"large"}
    refused("lacks files", CheckpointError)
    assert not any(name.endswith(".safetensors") for name in fake_hub.sent())


def test_fetches_the_files_of_the_index(fake_hub: FakeHub) -> None:
    shards = {name: name.encode() for name in INDEX["weight_map"].values()}
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    stray = {"consolidated.safetensors": b"twice as much"}
    fake_hub.repositories["o/m"] = {**SMALL, **index, **shards, **stray}
    directory = whole().directory
    assert all((directory / name).read_bytes() == content for name, content in shards.items())
    assert "consolidated.safetensors" not in fake_hub.sent()


def test_bin_weights_only_by_flag(fake_hub: FakeHub) -> None:
    fake_hub.repositories["o/m"] = {**SMALL, "pytorch_model.bin": b"pickle"}
    refused("load_bin", CheckpointError)
    assert "pytorch_model.bin" not in fake_hub.sent()
    assert (whole(load_bin=True).directory / "pytorch_model.bin").read_bytes() == b"pickle"


def test_bin_weights_stay_away_where_there_are_safetensors(model: FakeHub) -> None:
    whole(load_bin=True)
    assert "pytorch_model.bin" not in model.sent()


def test_sharded_bin(fake_hub: FakeHub) -> None:
    index = {"weight_map": {"a": "p-1.bin", "b": "p-2.bin"}}
    fake_hub.repositories["o/m"] = {
        **SMALL,
        "pytorch_model.bin.index.json": json.dumps(index).encode(),
        "p-1.bin": b"1",
        "p-2.bin": b"2",
    }
    directory = whole(load_bin=True).directory
    assert {"p-1.bin", "p-2.bin"} <= {path.name for path in directory.iterdir()}


def test_chat_templates_beside_the_tokenizer(model: FakeHub) -> None:
    model.repositories["o/m"] |= {"chat_template.jinja": b"one", "additional_chat_templates/tools.jinja": b"two"}
    directory = resolve("o/m").directory
    assert (directory / "chat_template.jinja").read_bytes() == b"one"
    assert (directory / "additional_chat_templates" / "tools.jinja").read_bytes() == b"two"


def test_revision_and_token_reach_the_hub(model: FakeHub) -> None:
    model.needs_token = "secret"
    refused(r"o/m is restricted: accept its conditions at https://huggingface.co/o/m and give a token")
    assert whole(token="secret", revision="v1").revision == COMMIT
    assert any("/revision/v1" in line for line in model.requests)


# ---- cache first ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, "main", "v1", COMMIT])
def test_what_is_cached_needs_no_network(model: FakeHub, revision: str | None) -> None:
    first = whole(revision=revision)
    model.requests.clear()
    second = whole(revision=revision)
    assert model.requests == []
    assert (second.directory, second.revision, second.origin) == (first.directory, COMMIT, "cache")
    assert whole(revision=revision, offline=True).origin == "cache"


def test_another_revision_is_not_taken_from_the_cache(model: FakeHub) -> None:
    whole()
    refused("revision 'v1' is not in", revision="v1", offline=True)


@pytest.mark.parametrize("lost", ["model.safetensors", "tokenizer.json", "config.json"])
def test_what_is_missing_in_the_cache_is_fetched(model: FakeHub, lost: str) -> None:
    directory = whole().directory
    (directory / lost).unlink()
    assert whole().origin == "hub"
    assert (directory / lost).exists()


def test_a_missing_shard_is_noticed_offline(fake_hub: FakeHub) -> None:
    shards = dict.fromkeys(INDEX["weight_map"].values(), b"w")
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    fake_hub.repositories["o/m"] = {**SMALL, **index, **shards}
    (whole().directory / "model-00002-of-00002.safetensors").unlink()
    refused("offline, and the hub's cache holds o/m without its weights, or not all of them", offline=True)
    assert whole().origin == "hub"


def test_small_files_alone_do_offline_until_weights_are_asked_for(model: FakeHub, monkeypatch: Any) -> None:
    directory = resolve("o/m").directory
    model.requests.clear()
    files = resolve("o/m", offline=True)
    assert (files.directory, files.origin, files.revision) == (directory, "cache", COMMIT)
    with pytest.raises(ModelNotFoundError, match=r"offline, .* holds o/m without its weights.*hf download o/m"):
        files.fetch_weights()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("offline, .* holds o/m without its weights")
    assert model.requests == []


def test_offline_with_bin_weights_in_the_cache(fake_hub: FakeHub) -> None:
    fake_hub.repositories["o/m"] = {**SMALL, "pytorch_model.bin": b"pickle"}
    whole(load_bin=True)
    assert whole(load_bin=True, offline=True).origin == "cache"
    refused("load_bin", CheckpointError, offline=True)


def test_weights_without_a_tokenizer_serve_offline(model: FakeHub) -> None:
    del model.repositories["o/m"]["tokenizer.json"]
    whole()
    assert whole(offline=True).origin == "cache"


def test_environment_says_offline(model: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("offline, and o/m is not in the hub's cache")
    assert model.requests == []


# ---- errors --------------------------------------------------------------------------------------------------------


def test_unknown_names_get_suggestions(model: FakeHub) -> None:
    whole()
    refused("no model 'o/mm' on the hub.*Did you mean 'o/m'", name="o/mm")


def test_a_name_that_is_almost_a_directory_here(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2").mkdir()
    refused(r"Did you mean '\./SmolLM2'", name="SmolLM")


def test_unknown_revision(model: FakeHub) -> None:
    refused("o/m on the hub has no revision 'v9'", revision="v9")


@pytest.mark.parametrize("revision", ["", "../../etc", "/etc", "a\0"])
def test_revisions_that_are_paths(model: FakeHub, revision: str) -> None:
    refused("revision", ConfigError, revision=revision)
    assert model.requests == []


@pytest.mark.parametrize("name", ["o m/x", "-o/m", "o/m..x", "o/m--x", "o m", "o/m?x", "Ω", "a" * 97])
def test_names_that_cannot_be(fake_hub: FakeHub, name: str) -> None:
    refused("nor a name on the hub", name=name)
    assert fake_hub.requests == []


def test_no_network(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(r"cannot reach the hub for o/m \(Connect.*It is empty.*hf download o/m")


def test_no_network_and_half_a_model(model: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small files serve from the cache, as offline; the weights are what is missed."""
    directory = resolve("o/m").directory
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve("o/m").directory == directory
    refused("cannot reach the hub for o/m.*It holds o/m")


def test_the_hub_is_down_or_says_no(model: FakeHub) -> None:
    model.error = (500, "")
    refused("the hub answered with status 500")
    model.error = (403, "")
    refused("refused access")


def test_disk_full(model: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    refused("cannot store o/m.*No space left")


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"m.Q4_1.gguf": b"", "README.md": b""}, r"GGUF files only.*hf download o/m m\.Q4_1\.gguf"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "adapter"),
        ({"pytorch_model.bin": b""}, "not a model in the Hugging Face layout.*pytorch_model.bin"),
        ({"config.json": b"{}", "tf_model.h5": b""}, "not a model in the Hugging Face layout"),
        ({"config.json": b"{}", "model.safetensors.index.json": json.dumps(INDEX).encode()}, "lacks files"),
    ],
)
def test_repositories_that_hold_something_else(fake_hub: FakeHub, files: dict[str, bytes], match: str) -> None:
    fake_hub.repositories["o/m"] = files
    refused(match, CheckpointError)


def test_an_index_that_leads_elsewhere_fetches_nothing(fake_hub: FakeHub) -> None:
    index = json.dumps({"weight_map": {"a": "../../secret.safetensors"}}).encode()
    fake_hub.repositories["o/m"] = {**SMALL, "model.safetensors.index.json": index}
    refused("secret", CheckpointError)
    assert not any("secret" in line for line in fake_hub.requests)


def test_cached_models_are_listed(model: FakeHub) -> None:
    assert hub.cached_models() == []
    whole()
    assert hub.cached_models() == ["o/m"]


def test_no_progress_bars_off_a_terminal(model: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    whole()
    assert capfd.readouterr() == ("", "")


# ---- adapters ------------------------------------------------------------------------------------------------------

MODULES = {f"model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in (0, 1)}


def adapter(tmp_path: Path, *, binary: bool = False) -> dict[str, bytes]:
    """The files of one, and what must not be fetched."""
    directory = random_lora(tmp_path / "made", MODULES)
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    if binary:
        torch.save(load_file(directory / hub.ADAPTER_WEIGHTS), directory / hub.ADAPTER_BIN)
        del files[hub.ADAPTER_WEIGHTS]
        files[hub.ADAPTER_BIN] = (directory / hub.ADAPTER_BIN).read_bytes()
    return {**files, "README.md": b"hello", "optimizer.pt": b"pickle", "checkpoint-1/adapter_config.json": b"{}"}


def test_an_adapter_by_name_is_fetched_once_and_alone(fake_hub, tmp_path):
    model = tiny_llama(tmp_path / "tiny", tokenizer=False)
    fake_hub.repositories["o/a"] = adapter(tmp_path)
    for options in ({}, {"offline": True}, {}):
        drawn = draw(model, EngineConfig(lora={"sql": "o/a"}, device="cpu", num_blocks=8, **options))
        assert [target.module for target in drawn.loras[0].targets] == list(MODULES)
        fake_hub.error = (500, "")  # from now on all is here
    fetched = {line.rpartition("/")[2] for line in fake_hub.requests if line.startswith("GET /o/a/resolve")}
    assert fetched == {hub.ADAPTER_CONFIG, hub.ADAPTER_WEIGHTS}


def test_an_adapter_in_bin_format_by_name(fake_hub, tmp_path):
    model = tiny_llama(tmp_path / "tiny", tokenizer=False)
    fake_hub.repositories["o/a"] = adapter(tmp_path, binary=True)
    config = {"lora": {"sql": "o/a"}, "device": "cpu", "num_blocks": 8}
    with pytest.raises(CheckpointError, match=r"'sql' \(o/a\): it has PyTorch .bin weights only.*--load-bin"):
        draw(model, EngineConfig(**config))
    assert not any(line.endswith(hub.ADAPTER_BIN) for line in fake_hub.requests)
    for _ in range(2):
        assert draw(model, EngineConfig(**config, load_bin=True)).loras
        fake_hub.error = (500, "")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("o/none", {}, "there is no model 'o/none' on the hub"),
        ("o/none", {"offline": True}, "offline, and o/none is not in the hub's cache"),
        ("o/m", {}, "it has no adapter_config.json, so it is no adapter"),
        ("o/a b", {}, "neither a file or directory here nor a name on the hub"),
        ("a", {}, "there is no such directory"),
        ("a/b/c", {}, "there is no such directory"),
    ],
)
def test_adapters_that_are_not_there(fake_hub, tmp_path, name, options, message):
    model = tiny_llama(tmp_path / "tiny", tokenizer=False)
    fake_hub.repositories["o/m"] = dict(SMALL)
    with pytest.raises(FastgenError, match="LoRA adapter 'sql'") as caught:
        draw(model, EngineConfig(lora={"sql": name}, device="cpu", num_blocks=8, **options))
    assert message in str(caught.value)
