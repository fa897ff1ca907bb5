"""The last resort, and no other: who is served by it, what it says, and that its trial of the loaded model can fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from fastgen_transformers import check, fastgen_models, routing, weights

from fastgen import Engine, PluginError, UnsupportedModelError
from fastgen import api as fg
from fastgen.testing.checkpoints import tiny_llama


def test_importing_the_plugin_loads_no_torch():
    code = (
        "import sys, fastgen_transformers as f; f.fastgen_models(); print({'torch', 'transformers'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def cli(*arguments: object) -> str:
    command = [sys.executable, "-m", "fastgen", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_it_claims_patterns_alone():
    """So that whoever names an architecture comes first."""
    rows = json.loads(cli("models", "--json"))
    ours = [row for row in rows if row["plugin"] == "transformers"]
    assert ours
    assert all(row["fallback"] and ("*" in row["architecture"] or "Bert" in row["architecture"]) for row in ours)
    assert not {row["architecture"] for row in ours} & {row["architecture"] for row in rows if not row["fallback"]}


def test_an_architecture_with_a_plugin_never_reaches_it(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("fastgen_transformers.config.resolve", never)
    with Engine.load(tiny_llama(tmp_path), device="cpu", num_blocks=16) as engine:
        assert engine.blueprint.spec.plugin == "llama"


def test_a_pin_reaches_it(tmp_path):
    options = {"device": "cpu", "num_blocks": 16}
    tiny_llama(tmp_path)
    with Engine.load(tmp_path, adapter={"LlamaForCausalLM": "fastgen-transformers"}, **options) as engine:
        assert engine.blueprint.spec.plugin == "transformers"
    with pytest.raises(PluginError, match="no such plugin"):
        Engine.load(tmp_path, adapter={"LlamaForCausalLM": "transformer"}, **options)


def test_its_spec_is_a_fallback():
    (spec,) = fastgen_models()
    assert spec.fallback


def test_it_is_said_aloud_on_load(checkpoint, caplog):
    with Engine.load(checkpoint("glm"), device="cpu", num_blocks=16) as engine:
        assert engine.blueprint.spec.plugin == "transformers"
    said = [record.getMessage() for record in caplog.records if "fallback" in record.getMessage()]
    assert len(said) == 1
    assert "GlmForCausalLM" in said[0]
    assert "it matches" in said[0]


@pytest.mark.slow
def test_explain_says_it_too(checkpoint):
    facts = json.loads(cli("explain", checkpoint("glm"), "--json"))
    assert facts["model"]["plugin"].startswith("transformers (fastgen-transformers ")
    assert any("modelling code" in warning for warning in facts["warnings"])


def test_one_never_tried_is_said_to_be(monkeypatch, checkpoint, load, caplog):
    from fastgen_transformers import verified

    monkeypatch.setattr(verified, "table", lambda: {"rows": []})
    load(checkpoint("glm")).close()
    assert "never compared with transformers' generate" in caplog.text


def test_one_that_differed_is_refused(monkeypatch, checkpoint, load):
    from fastgen_transformers import verified

    row = {"model_type": "glm", "architecture": "GlmForCausalLM", "verdict": "differs", "reason": "token 2"}
    monkeypatch.setattr(verified, "table", lambda: {"transformers": "5", "rows": [row]})
    with pytest.raises(UnsupportedModelError, match="token 2"):
        load(checkpoint("glm"))


# ---- the trial: each fault that it is there for must make it fail ---------------------------------------------------


def _shifted(original):
    def forward(self, batch):
        batch.positions = batch.positions + (batch.positions > 10)
        return original(self, batch)

    return forward


def _blind(original):
    """Later pieces of a prompt do not see the earlier ones."""

    def attend(module, query, key, value, mask, **kwargs):
        layout = routing._running.get().batch.layout
        layout.contexts = list(layout.counts)
        return original(module, query, key, value, mask, **kwargs)

    return attend


def _mixed(original):
    """A sequence sees its neighbour's last token."""

    def attend(module, query, key, value, mask, **kwargs):
        return original(module, query, key, value.roll(1, 2), mask, **kwargs)

    return attend


def test_the_trial_finds_shifted_positions(monkeypatch, checkpoint, load):
    from fastgen_transformers.hosted import HostedDecoder

    monkeypatch.setattr(HostedDecoder, "forward", _shifted(HostedDecoder.forward))
    with pytest.raises(UnsupportedModelError, match="are not those of transformers' own forward pass"):
        load(checkpoint("glm"))


@pytest.mark.parametrize("fault", [_blind, _mixed])
def test_the_trial_finds_wrong_attention(monkeypatch, checkpoint, load, fault):
    from transformers import AttentionInterface

    monkeypatch.setitem(
        AttentionInterface._global_mapping, routing.NAME, fault(AttentionInterface._global_mapping[routing.NAME])
    )
    with pytest.raises(UnsupportedModelError, match="are not those of transformers' own forward pass"):
        load(checkpoint("glm"))


def test_the_trial_finds_a_model_that_fails(monkeypatch, checkpoint, load):
    def fail(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr(check, "_in_passes", fail)
    with pytest.raises(UnsupportedModelError, match=r"two short prompts failed \(RuntimeError: boom\)"):
        load(checkpoint("glm"))


def test_it_is_strict_where_rounding_is_small(checkpoint, load):
    """What rounding explains is measured with the model; a tame one gets no more than the floor."""
    with load(checkpoint("glm")) as engine:
        model = engine._model.hosted.model
        prompt = torch.arange(3, 20)
        plain, nudged = check._plain(model, prompt), check._plain(model, prompt, nudge=16 * torch.finfo().eps)
    assert 0 < check._off(nudged, plain) * check._MARGIN < 1e-2


def test_its_errors_are_fastgens():
    assert issubclass(UnsupportedModelError, fg.FastgenError)
    with pytest.raises(fg.CheckpointError, match="nothing in the model takes: a"):
        weights._complain(["a"], [], [])
