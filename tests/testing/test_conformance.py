"""The kit as an author runs it: parts of the plugin's own making, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from fastgen.core.plugin.conformance import FAULT, Case, read_report
from fastgen.testing import TINY, ModelConformance, plugin
from fastgen.testing.plugin import Collected
from fastgen.testing.subject import transformers_config

ODD = """
import torch
from torch import nn
from fastgen import api as fg


class Narrow(fg.Layer):
    '''Keys and values in one map of the plugin's own, stored the other way round.'''

    def __init__(self, hidden, width):
        super().__init__()
        self.both = fg.parameter(hidden, 2 * width)
        self.width = width

    def want(self):
        return {(side, "weight"): (self.width, self.both.shape[0]) for side in ("key", "value")}

    def place(self, slot, tail):
        return self.both.t()[: self.width] if slot == "key" else self.both.t()[self.width :]

    def forward(self, x):
        return (x @ self.both).chunk(2, -1)


class Look(nn.Module):
    def __init__(self, c, rope):
        super().__init__()
        self.c, self.turn = c, rope
        self.ask = fg.Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.told = Narrow(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.pages = fg.CachedAttention(c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        self.back = fg.Linear(c.num_attention_heads * c.head_dim, c.hidden_size)

    def forward(self, x, batch):
        key, value = (t.reshape(len(x), -1, self.c.head_dim) for t in self.told(x))
        query = self.ask(x).view(len(x), -1, self.c.head_dim)
        return self.back(self.pages(self.turn(query, batch), self.turn(key, batch), value, batch).flatten(1))


class Odd(fg.Block):
    def __init__(self, c, rope):
        super().__init__()
        self.before = fg.RMSNorm(c.hidden_size, c.norm_eps)
        self.look = Look(c, rope)
        self.between = fg.RMSNorm(c.hidden_size, c.norm_eps)
        self.think = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)

    def forward(self, stream, delta, batch):
        stream = stream if delta is None else stream + delta
        stream = stream + self.look(self.before.alone(stream), batch)
        return stream + self.think(self.between.alone(stream)), None
"""

ENTRY = """
from fastgen import api as fg
from fastgen.models.llama import LlamaConfig


def build(c):
    from odd_parts import Odd

    rope, tokens = fg.Rope(c.rope), fg.Table(c.vocab_size, c.hidden_size)
    return fg.Decoder(
        embed=fg.Embed(tokens),
        blocks=[Odd(c, rope) for _ in range(c.num_hidden_layers)],
        norm=fg.RMSNorm(c.hidden_size, c.norm_eps),
        head=fg.Head(tokens, tied=c.tie_word_embeddings),
    )


def rules():
    layer, block = "model.layers.*", "blocks.*"
    yield f"{layer}.input_layernorm", f"{block}.before"
    yield f"{layer}.post_attention_layernorm", f"{block}.between"
    yield f"{layer}.self_attn.q_proj", f"{block}.look.ask"
    yield f"{layer}.self_attn.k_proj", f"{block}.look.told[key]"
    yield f"{layer}.self_attn.v_proj", f"{block}.look.told[value]"
    yield f"{layer}.self_attn.o_proj", f"{block}.look.back"
    yield f"{layer}.mlp.gate_proj", f"{block}.think.up[gate]"
    yield f"{layer}.mlp.up_proj", f"{block}.think.up[up]"
    yield f"{layer}.mlp.down_proj", f"{block}.think.down"


WEIGHTS = fg.DECODER_WEIGHTS.but(dict(rules()))


class Hooks:
    @fg.hookimpl
    def fastgen_models(self):
        return [fg.ModelSpec(("LlamaForCausalLM",), LlamaConfig, build, WEIGHTS)]


hooks = Hooks()
"""

WRONG = """
import odd_entry
from fastgen import api as fg


def build(c):
    return odd_entry.build(c.model_copy(update={"norm_eps": 0.1}))


@fg.hookimpl
def fastgen_models():
    return [fg.ModelSpec(("LlamaForCausalLM",), odd_entry.LlamaConfig, build, odd_entry.WEIGHTS)]
"""

TESTS = """
from fastgen.testing import ModelConformance

LLAMA = {"model_type": "llama"}


class TestOdd(ModelConformance):
    entry = "odd_entry:hooks"
    hf_config = {"plain": LLAMA}


class TestWrong(ModelConformance):
    entry = "odd_wrong"
    hf_config = LLAMA


class TestAgain(ModelConformance):
    entry = "odd_entry:hooks"
    hf_config = {"plain": {**LLAMA, "head_dim": 16}, "more heads": {**LLAMA, "num_key_value_heads": 4}}
"""


@pytest.fixture
def run_pytest(tmp_path):
    """``run(*options)``: what pytest prints about the tests above, in a process of its own."""
    for name, text in (("odd_parts", ODD), ("odd_entry", ENTRY), ("odd_wrong", WRONG), ("test_odd", TESTS)):
        (tmp_path / f"{name}.py").write_text(text)

    def run(*options: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        plugins = ["-p", "fastgen.testing.plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *options]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    return run


@pytest.mark.thorough
def test_the_report_of_a_run(tmp_path, run_pytest):
    """Parts of a plugin's own making pass, wherever its modules are and whatever they are called; a wrong adapter
    fails; both stand in the report, beside the entry module too."""
    told = run_pytest("--conformance-json=out/report.json", "--conformance-beside", "-k", "not TestAgain")

    report = read_report(tmp_path / "out" / "report.json")
    assert set(report) == {"odd_entry:hooks", "odd_wrong"}, told
    odd, bad = report["odd_entry:hooks"], report["odd_wrong"]
    assert odd.passed, told
    assert odd.complete
    assert set(odd.cases) == {"plain", ""}
    assert odd.architectures == ("LlamaForCausalLM",)
    assert (odd.plugin, odd.distribution, odd.version) == (None, None, None)
    noticed, planted = odd.faults
    assert noticed == planted >= 20
    checks = odd.cases["plain"].checks
    for fault in ("shifted KV head", "rope pairing", "misread: blocks.*.look.told[key]", "dropped norm: norm"):
        assert checks[f"{FAULT}{fault}"] == "pass"
    assert checks[f"{FAULT}window one longer"] == checks["window"] == "n.a."

    assert not bad.passed
    assert bad.cases["default"].checks["prefill"] == bad.cases["default"].checks["sensitivity"] == "fail"
    assert bad.cases["default"].checks["weights fill everything"] == "pass"
    assert bad.summary().startswith("failed: prefill[default]")
    assert "The first position is wrong already" in told
    assert "what block 0 (Odd) returns is the first that differs" in told

    assert read_report(tmp_path / "odd_entry.conformance.json") == {"odd_entry:hooks": odd}
    assert read_report(tmp_path / "odd_wrong.conformance.json") == {"odd_wrong": bad}


@pytest.mark.thorough
def test_a_partial_report_from_a_worker(tmp_path, run_pytest):
    told = run_pytest("--conformance-json=report.json", "-k", "prefill or missing", "-n", "1", "--dist", "loadfile")
    report = read_report(tmp_path / "report.json")
    assert set(report) == {"odd_entry:hooks", "odd_wrong"}, told
    odd, bad = report["odd_entry:hooks"], report["odd_wrong"]
    assert odd.passed
    assert set(odd.cases) == {"plain", "TestAgain: plain", "more heads"}
    assert odd.summary() == "partial (3 cases, 0/0 faults)"
    assert odd.cases["plain"].checks == {
        "prefill": "pass",
        "window": "n.a.",
        "rope length": "n.a.",
        "weights missing and extra": "pass",
    }
    assert bad.cases["default"].checks == {"prefill": "fail", "weights missing and extra": "pass"}


def account(test: str, case: str = "a", **more) -> dict:
    told = {"entry": "e", "class": "TestE", "case": case, "architecture": None, "test": test, "checks": {}}
    return {**told, "expected": ["one", "two"], **more}


def test_what_was_told_adds_up():
    collected = Collected()
    collected.add(account("one", checks={"extra": "n.a."}, architecture="A"), failed=False)
    (half,) = collected.reports()
    assert half.cases == {"a": Case("A", {"extra": "n.a.", "one": "pass"})}
    assert not half.complete
    collected.add(account("two", checks={"fault: x": "fail"}), failed=True)
    (whole,) = collected.reports()
    assert whole.complete
    assert whole.cases["a"] == Case("A", {"extra": "n.a.", "one": "pass", "fault: x": "fail", "two": "fail"})
    assert (whole.plugin, whole.fastgen != "") == (None, True)
    collected.add(account("two"), failed=False)  # an error in its teardown comes after a pass, too
    (after,) = collected.reports()
    assert after.cases["a"].checks["two"] == "fail"


@pytest.mark.parametrize(("worker", "written"), [(False, True), (True, False)])
def test_the_report_is_written_once_and_only_of_something(tmp_path, worker, written):
    collected = Collected()
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda _: collected),
        getoption=lambda name, default: str(tmp_path / "c.json") if name == "--conformance-json" else default,
        **({"workerinput": {}} if worker else {}),
    )
    plugin.pytest_sessionfinish(SimpleNamespace(config=config))
    assert not (tmp_path / "c.json").exists()  # nothing of the kit ran
    collected.add(account("one"), failed=False)
    plugin.pytest_sessionfinish(SimpleNamespace(config=config))
    assert (tmp_path / "c.json").exists() == written


def test_a_report_that_cannot_be_written_fails_the_run(tmp_path):
    lines: list[str] = []
    collected, reporter = Collected(), SimpleNamespace(write_line=lambda line, red: lines.append(line))
    collected.add(account("one", entry="nowhere_to_be_found"), failed=False)
    config = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin=lambda name: reporter if name == "terminalreporter" else collected),
        getoption=lambda name, default: name == "--conformance-beside" or default,
    )
    session = SimpleNamespace(config=config, exitstatus=0)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.USAGE_ERROR
    assert "'nowhere_to_be_found' is in no file" in lines[0]


def test_a_case_of_another_class_has_a_name_of_its_own():
    collected = Collected()
    collected.add(account("one"), failed=False)
    collected.add(account("one", **{"class": "TestOther"}), failed=True)
    (report,) = collected.reports()
    assert {name: case.checks["one"] for name, case in report.cases.items()} == {"a": "pass", "TestOther: a": "fail"}


def test_a_check_may_call_itself_not_applicable():
    collected = Collected()
    collected.add(account("one", checks={"one": "n.a."}), failed=False)
    (report,) = collected.reports()
    assert report.cases["a"].checks == {"one": "n.a."}


def test_sizes_left_out_are_tiny_under_any_name():
    gpt2 = transformers_config({"model_type": "gpt2", "n_head": 2})
    assert (gpt2.n_embd, gpt2.n_layer, gpt2.n_head, gpt2.n_positions) == (32, 2, 2, 512)
    assert not hasattr(gpt2, "intermediate_size")
    llama = transformers_config({"model_type": "llama", "hidden_size": 48, "pad_token_id": 0})
    assert (llama.hidden_size, llama.vocab_size, llama.pad_token_id) == (48, TINY["vocab_size"], 0)


def test_one_config_or_several():
    one = type("One", (ModelConformance,), {"entry": "e", "hf_config": {"model_type": "llama"}})
    several = type("Several", (ModelConformance,), {"entry": "e", "hf_config": {"a": {"model_type": "llama"}}})
    assert one.cases() == {"default": {"model_type": "llama"}}
    assert several.cases() == {"a": {"model_type": "llama"}}


def test_the_testing_package_is_lazy():
    code = textwrap.dedent(
        """
        import sys, json
        import fastgen.testing, fastgen.testing.plugin
        print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
