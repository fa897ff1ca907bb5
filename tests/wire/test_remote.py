"""An engine in another process answers as one in this process does, object for object."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastgen
from fastgen import api
from fastgen.config import EngineConfig
from fastgen.errors import (
    ConfigError,
    EngineClosedError,
    FastgenError,
    InvalidRequestError,
    ModelNotFoundError,
    PluginError,
)
from fastgen.front import Pipeline
from fastgen.front.verbs import Verbs
from fastgen.testing.adapters import random_lora
from fastgen.testing.answers import alike
from fastgen.testing.children import Holdings, faulty_plugin, wait_until
from fastgen.text import Tokenizer
from fastgen.types import Chunk, Response
from fastgen.wire.info import Pass
from fastgen.wire.launching import WORKER, Plan, start_engine
from fastgen.wire.process import Child
from fastgen.wire.remote import RemoteLoop

SECONDS = 60
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_blocks": 64, "max_batch_tokens": 32, "seed": 7}


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    modules = {f"model.layers.{n}.self_attn.q_proj": (32, 32) for n in range(2)}
    adapter = random_lora(tmp_path_factory.mktemp("adapter"), modules, alpha=64.0)
    return EngineConfig(**OPTIONS, lora={"one": str(adapter)})


@pytest.fixture(scope="module")
def here(tiny: Path, config: EngineConfig, faults: None) -> Iterator[Pipeline]:
    with fastgen.pipeline(tiny, config, progress=False) as pipe:
        yield pipe


class Remote:
    """An engine process, and verbs over it."""

    def __init__(self, model: Path, config: EngineConfig) -> None:
        self.child = Child(WORKER)
        self.said: list[str] = []
        try:
            self.ready = start_engine(self.child, Plan(str(model), config), timeout=SECONDS, progress=self.said.append)
        except BaseException:
            self.child.kill()
            self.child.end()
            raise
        self.tokenizer = Tokenizer.load(Path(self.ready.directory))
        self.loop = RemoteLoop(self.child.channel, self.tokenizer)
        self.verbs = Verbs(
            self.loop, tokenizer=self.tokenizer, config=config, max_model_len=self.ready.info.max_model_len
        )

    def close(self) -> str:
        self.loop.stop("the test is over")
        self.loop.join()
        return self.child.end(SECONDS)


@pytest.fixture(scope="module")
def remote(tiny: Path, config: EngineConfig, faults: None) -> Iterator[Remote]:
    made = Remote(tiny, config)
    yield made
    how = made.close()
    assert how == "it exited with code 0"


COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "seeded": {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    "several choices": {"n": 3, "temperature": 1.2, "seed": 5, "max_new_tokens": 9},
    "log-probabilities": {"logprobs": 3, "max_new_tokens": 5, "ignore_eos": True},
    "chosen only": {"logprobs": 0, "max_new_tokens": 5, "n": 2, "temperature": 1.0, "seed": 1},
    "prompt log-probabilities": {"prompt_logprobs": 2, "logprobs": 1, "max_new_tokens": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "max_new_tokens": 9},
    "bias and stop ids": {"logit_bias": {70: 100.0}, "stop_token_ids": [70], "include_stop": True},
    "lora": {"lora": "one", "max_new_tokens": 12},
    "salted": {"cache_salt": "a", "max_new_tokens": 3, "skip_special_tokens": False},
}


@pytest.mark.parametrize("options", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions(here: Pipeline, remote: Remote, options: dict[str, Any]) -> None:
    prompts = ["The quick brown fox", "a😀", "x" * 70]
    assert alike(remote.verbs(prompts, **options), here(prompts, **options))
    ours = list(here.stream(prompts[0], **options))
    assert alike(list(remote.verbs.stream(prompts[0], **options)), ours)
    assert alike(remote.verbs(prompts[0], **options), here(prompts[0], **options))


def test_answers_that_differ_are_not_alike(here: Pipeline, remote: Remote) -> None:
    ours = here("abc", max_new_tokens=5, logprobs=1, ignore_eos=True)
    assert alike(remote.verbs("abc", max_new_tokens=5, logprobs=1, ignore_eos=True), ours)
    for other in ({"max_new_tokens": 6}, {"logit_bias": {ours.token_ids[2]: -100.0}}, {"logprobs": 0}, {"n": 2}):
        options = {"max_new_tokens": 5, "logprobs": 1, "ignore_eos": True, **other}
        assert not alike(remote.verbs("abc", **options), ours)


def test_lora_changes_the_answer(remote: Remote) -> None:
    assert remote.verbs("abc", lora="one").token_ids != remote.verbs("abc").token_ids


def test_stop_strings_end_here_and_there(here: Pipeline, remote: Remote) -> None:
    options: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}
    whole = here("stop me", **options)
    stop = whole.text[10:13]
    came = remote.verbs("stop me", stop=[stop], **options)
    assert came.stop == stop
    assert len(came.token_ids) < 200
    assert alike(came, here("stop me", stop=[stop], **options))
    wait_until(lambda: remote.loop.stats is not None and remote.loop.stats.running == 0)
    assert remote.loop.in_flight == 0


def test_chats(here: Pipeline, remote: Remote) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    options: dict[str, Any] = {"template": template, "max_new_tokens": 6}
    assert alike(remote.verbs.chat(messages, **options), here.chat(messages, **options))
    del options["max_new_tokens"]  # what fits
    assert alike(remote.verbs.chat(messages, **options), here.chat(messages, **options))


def test_async_verbs(here: Pipeline, remote: Remote) -> None:
    async def ask(verbs: Verbs) -> tuple[list[Response], list[Chunk]]:
        answers = await asyncio.gather(*(verbs.acall(f"prompt {n}", max_new_tokens=8) for n in range(20)))
        return list(answers), [chunk async for chunk in verbs.astream("stream", max_new_tokens=8, n=2)]

    theirs, ours = asyncio.run(ask(remote.verbs)), asyncio.run(ask(here))
    assert alike(theirs[0], ours[0])
    assert alike(sorted(theirs[1], key=lambda c: c.index), sorted(ours[1], key=lambda c: c.index))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": [1, 10**6]}, "prompt_token_ids"),
    ({"prompts": "x" * 600}, "prompt"),
    ({"prompts": "a", "max_new_tokens": 100_000}, "max_new_tokens"),
    ({"prompts": "a", "lora": "two"}, "lora"),
    ({"prompts": "a", "logits_processors": {"nobody": {}}}, "logits_processors"),
    ({"prompts": "a", "logit_bias": {10**6: 1.0}}, "logit_bias"),
    ({"prompts": ["fine", "x" * 600, "fine"]}, "prompt"),
]


@pytest.mark.parametrize(("arguments", "field"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_refusals_are_in_the_same_words(here: Pipeline, remote: Remote, arguments: dict[str, Any], field: str) -> None:
    errors = []
    for verbs in (here, remote.verbs):
        with pytest.raises(InvalidRequestError) as caught:
            verbs(**arguments)
        errors.append(caught.value)
    assert str(errors[0]) == str(errors[1])
    assert errors[0].field == errors[1].field == field
    assert remote.loop.in_flight == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt_token_ids": [1, 2**80]}, "prompt_token_ids"),
        ({"prompts": "a", "priority": 2**80}, "priority"),
        ({"prompts": "a", "logits_processors": {"sleeps": {"x": object()}}}, "logits_processors"),
    ],
)
def test_what_cannot_be_sent_is_refused(remote: Remote, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        remote.verbs(**arguments)
    assert caught.value.field == field


def test_a_processor_that_raises_hurts_no_neighbour(here: Pipeline, remote: Remote) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    bad = {"logits_processors": {"raises": {"after": 3}}}
    healthy = remote.verbs.stream("a healthy one", **options)
    failed = remote.verbs("a", **bad, **options)
    assert alike(failed, here("a", **bad, **options))
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 3)
    assert alike(list(healthy), list(here.stream("a healthy one", **options)))


def test_closing_a_stream_frees_its_blocks(remote: Remote) -> None:
    stream = remote.verbs.stream("abc", max_new_tokens=400, ignore_eos=True)
    next(stream)
    assert remote.loop.outstanding_tokens > 0
    stream.close()
    wait_until(lambda: remote.loop.in_flight == 0)
    wait_until(lambda: remote.loop.stats is not None and remote.loop.stats.used_blocks == 0)
    assert remote.loop.outstanding_tokens == 0


def test_passes_are_told(remote: Remote) -> None:
    seen: list[Pass] = []
    end = remote.loop.watch(seen.extend)
    answer = remote.verbs("x" * 50, max_new_tokens=4, ignore_eos=True, cache_salt="passes")
    wait_until(lambda: sum(p.tokens for p in seen) >= 53)
    end()
    assert len(answer.token_ids) == 4
    assert sum(p.tokens for p in seen) == 50 + 3  # the last token is not run
    assert all(0 < p.tokens <= remote.ready.info.max_batch_tokens and p.seconds > 0 for p in seen)
    count = len(seen)
    remote.verbs("again", max_new_tokens=2)
    assert len(seen) == count


def test_what_it_says_of_itself(here: Pipeline, remote: Remote, tiny: Path) -> None:
    info = remote.ready.info
    assert (info.name, info.architecture, info.dtype, info.device) == (str(tiny), "LlamaForCausalLM", "float32", "cpu")
    assert (info.max_model_len, info.max_batch_tokens, info.total_blocks) == (here.max_model_len, 32, 64)
    assert (info.loras, info.version) == (("one",), fastgen.__version__)
    assert remote.ready.directory == str(tiny)
    assert remote.said == ["loading torch", "loading the model"]


# ---- what cannot start -----------------------------------------------------------------------------------------------


def fails(model: Path, config: EngineConfig) -> FastgenError:
    before = Holdings()
    with pytest.raises(FastgenError) as caught:
        Remote(model, config)
    assert Holdings() == before
    return caught.value


@pytest.mark.slow
def test_no_such_model(tmp_path: Path) -> None:
    error = fails(tmp_path / "nowhere", EngineConfig(offline=True, token="hf_secret"))
    assert type(error) is ModelNotFoundError
    assert "nowhere" in str(error)
    assert "hf_secret" not in str(error)


@pytest.mark.slow
def test_f2_a_plugin_of_this_process_alone(tiny: Path) -> None:
    class Local:
        @api.hookimpl
        def fastgen_commands(self) -> list[Any]:
            return []

    from fastgen.core.plugin.process import registered

    with registered(Local(), name="local"):
        error = fails(tiny, EngineConfig(**OPTIONS))
    assert type(error) is PluginError
    assert "'local' was registered by a call in the parent process" in str(error)


@pytest.mark.slow
def test_f2_another_version_of_a_plugin(tiny: Path, tmp_path: Path) -> None:
    source = "from fastgen import api\n\n@api.hookimpl\ndef fastgen_commands():\n    return []\n"
    with faulty_plugin(tmp_path, name="moving", source=source) as site:
        from fastgen.core.plugin import registry

        assert any("fastgen-moving==1.0" in line for line in registry().fingerprint())
        (site.directory / "fastgen_moving-1.0.dist-info").rename(site.directory / "fastgen_moving-2.0.dist-info")
        metadata = site.directory / "fastgen_moving-2.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 2.0"))
        error = fails(tiny, EngineConfig(**OPTIONS))
    assert type(error) is PluginError
    assert "only in the parent: moving fastgen-moving==1.0; only here: moving fastgen-moving==2.0" in str(error)


@pytest.mark.slow
def test_secrets_do_not_show(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    child = Child(WORKER)
    try:
        start_engine(child, Plan(str(tiny), EngineConfig(**OPTIONS, token="hf_secret")), timeout=SECONDS)
        for file in ("cmdline", "environ"):
            assert b"hf_secret" not in Path(f"/proc/{child.pid}/{file}").read_bytes()
    finally:
        child.end(SECONDS)
    assert "hf_secret" not in caplog.text + child.last_words()


@pytest.mark.slow
def test_an_engine_that_takes_too_long(tiny: Path) -> None:
    child = Child(WORKER)
    try:
        with pytest.raises(EngineClosedError, match=r"not ready within 0.1 seconds \(start_timeout\)"):
            start_engine(child, Plan(str(tiny), EngineConfig(**OPTIONS)), timeout=0.1)
    finally:
        assert "SIGKILL" in child.end()


def test_without_a_thread_for_it_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = Holdings()
    with monkeypatch.context() as patch:
        patch.setattr("fastgen.wire.process.Channel", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            Child(WORKER)
    assert Holdings() == before


def test_a_process_that_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talks.py").write_text(
        "import socket, sys, time\nprint('hello there')\nprint('WARNING some.where: careful', flush=True)\n"
        "end = socket.socket(fileno=int(sys.argv[2]))\nend.sendall(b'GET / HTTP/1.1')\n"
    )
    (tmp_path / "leaves.py").write_text("raise SystemExit('I will not')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, words in (("talks", "sent what is no message"), ("leaves", "code 1\nIts last lines were:\nI will not")):
        child = Child(module)
        try:
            with pytest.raises((EngineClosedError, ConfigError)) as caught:
                start_engine(child, Plan("x", EngineConfig()), timeout=SECONDS)
        finally:
            child.end()
        assert words in str(caught.value)


def test_what_a_child_prints_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prints.py").write_text(
        "import sys\nprint('plain')\nsys.stderr.buffer.write(b'\\xff\\n')\nsys.stderr.flush()\n"
        "print('WARNING some.where: careful\\nmore of it', file=sys.stderr)\nsys.stdout.write('y' * 40_000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level("INFO")
    child = Child("prints", label="engine 3")
    assert child.wait(SECONDS)
    child.end()
    lines = [(r.name, r.levelname, r.getMessage()) for r in caplog.records]
    assert ("fastgen.engine", "INFO", "engine 3: plain") in lines
    assert ("fastgen.engine", "INFO", "engine 3: \\xff") in lines
    assert ("some.where", "WARNING", "engine 3: careful") in lines
    assert ("fastgen.engine", "WARNING", "engine 3: more of it") in lines
    assert max(len(line) for _, _, line in lines) < 20_000
