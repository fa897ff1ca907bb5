"""The engine with quantised weights: the same answers however the work is cut, adapters on top, and clear refusals."""

from __future__ import annotations

import json
import random
import re
import shutil
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from fastgen.cli import main
from fastgen.config import EngineConfig
from fastgen.core.engine import Engine
from fastgen.core.layers import Linear
from fastgen.core.quant import plan_quantisation
from fastgen.errors import ConfigError, UnsupportedModelError
from fastgen.kernels import reference
from fastgen.kernels.ops import Implementation, KernelTable
from fastgen.kernels.quantisation import SCHEMES
from fastgen.testing.adapters import lora_factors, random_lora
from fastgen.testing.driver import HandDriver, load_decoder
from fastgen.types import SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12}
CIRCUMSTANCES = {
    "alone": {"max_sequences": 1},
    "batched": {},
    "in pieces": {"max_batch_tokens": 7, "max_sequences": 4},
    "from a cached prefix": {"prefix_caching": True},
    "preempted": {"num_blocks": 20},
}


def prompts() -> list[list[int]]:
    """Of many lengths; some share their beginnings."""
    rng = random.Random(1)
    common = [rng.randrange(3, 64) for _ in range(17)]
    return [
        (common if i % 2 else []) + [rng.randrange(3, 64) for _ in range(n)] for i, n in enumerate((1, 3, 30, 9, 14, 5))
    ]


def load(directory, **options) -> Engine:
    defaults = {"device": "cpu", "block_size": 4, "num_blocks": 256, "prefix_caching": False, "packed_cache": False}
    return Engine.load(directory, **{**defaults, **options})


def answers(engine: Engine, **params) -> list[list[int]]:
    found: dict[str, list[int]] = {
        engine.add(ids, SamplingParams(**{**GREEDY, **params}), request_id=str(i)): []
        for i, ids in enumerate(prompts())
    }
    while engine.has_work:
        for output in engine.step():
            assert output.token_id is not None, output
            found[output.request_id].append(output.token_id)
    return list(found.values())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama, tied", "qwen2 moe: a shared expert"])
def test_answers_do_not_depend_on_the_company(checkpoint, name, scheme):
    got, stats = {}, {}
    for circumstance, options in CIRCUMSTANCES.items():
        with load(checkpoint(name), quantization=scheme, **options) as engine:
            if circumstance == "from a cached prefix":
                answers(engine)
            got[circumstance], stats[circumstance] = answers(engine), engine.stats()
    assert stats["from a cached prefix"].prefix_hit_tokens > 0
    assert stats["preempted"].preemptions > 0
    assert got == dict.fromkeys(CIRCUMSTANCES, got["alone"])


def test_the_answers_are_the_schemes_own(checkpoint):
    """What is compared above is no float model's answer."""
    found = []
    for scheme in (None, *SCHEMES):
        with load(checkpoint("llama, tied"), quantization=scheme) as engine:
            found.append(answers(engine))
    assert found[0] != found[1] != found[2]


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_adapters_add_to_quantised_parts(checkpoint, tmp_path):
    """In floats, to what the packed weight gives; other requests in the pass do not see it."""
    directory = checkpoint("llama")
    sizes = {"model.layers.0.self_attn.o_proj": (96, 96), "model.layers.1.mlp.down_proj": (96, 160)}
    adapter = random_lora(tmp_path / "adapter", sizes, rank=4, alpha=8.0)
    expected = load_decoder(directory, quantization="int8", packed_cache=False)
    for path, (a, b) in zip(("blocks.0.attn.out", "blocks.1.mlp.down"), lora_factors(adapter).values(), strict=True):
        linear = expected.get_submodule(path)
        assert isinstance(linear, Linear)
        linear._linear = added(linear._linear, 2 * (b @ a))
    ids = prompts()[2]
    driver = HandDriver(expected)
    (rows,) = driver.run([(driver.add(ids), len(ids))])
    with load(directory, quantization="int8", lora={"own": str(adapter)}) as engine:
        got = {}
        for name, lora in (("with", "own"), ("without", None)):
            engine.add(
                ids, SamplingParams(**{**GREEDY, "max_new_tokens": 1}, prompt_logprobs=0, lora=lora), request_id=name
            )
        while engine.has_work:
            for output in engine.step():
                got[output.request_id] = [one.logprob for one in output.prompt_logprobs[1:]]
    wanted = rows.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got["with"]), wanted, rtol=1e-3, atol=1e-3)
    assert (torch.tensor(got["without"]) - wanted).abs().max() > 0.1


def added(linear, delta):
    return lambda x, weight, bias: linear(x, weight, bias) + F.linear(x, delta)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_option_names_the_schemes_there_are():
    (choices,) = (one for one in get_args(EngineConfig.model_fields["quantization"].annotation) if get_args(one))
    assert get_args(choices) == SCHEMES


@pytest.mark.parametrize("value", ["int3", "gptq", 8, True, ["int8"]])
def test_an_unknown_scheme(checkpoint, value):
    with pytest.raises(ConfigError, match=re.escape(f"quantization: got {value!r}; there are int8 and int4")):
        load(checkpoint("llama"), quantization=value)
    with pytest.raises(ConfigError, match=r"Did you mean 'int8'"):
        EngineConfig.of({"quantization": "in8"})


def test_no_kernel(checkpoint, monkeypatch):
    others = [one for one in reference.IMPLEMENTATIONS if one.operation != "quantised_linear"]
    unable = Implementation("quantised_linear", "abacus", object, lambda need: f"{need.sizes['scheme']}: no beads")
    with pytest.raises(ConfigError, match=r"quantization: int8 .* no kernel can run .* \(abacus: int8: no beads\)"):
        plan_quantisation(nn.Sequential(Linear(64, 64)), "int8", KernelTable("cpu", "float32", [*others, unable]))


def test_nothing_to_quantise():
    kernels = KernelTable("cpu", "float32", reference.IMPLEMENTATIONS)
    for model in (nn.Sequential(nn.Linear(64, 64)), nn.Sequential(Linear(64, 31))):
        with pytest.raises(ConfigError, match="finds nothing to quantise"):
            plan_quantisation(model, "int8", kernels)
    (part,) = plan_quantisation(nn.Sequential(Linear(64, 32)), "int8", kernels).parts
    assert part.path == "0"


def test_a_plugins_own_linear_stays_as_it_is():
    class Doubled(Linear):
        def forward(self, x):
            return F.linear(x, 2 * self.weight)

    plan = plan_quantisation(
        nn.Sequential(Linear(64, 64), Doubled(64, 64)), "int8", KernelTable("cpu", "float32", reference.IMPLEMENTATIONS)
    )
    assert [part.path for part in plan.parts] == ["0"]
    assert [(one.path, one.reason) for one in plan.kept] == [("1", "a plugin's own Doubled")]


def test_a17_a_quantised_checkpoint_is_refused_as_ever(checkpoint, tmp_path):
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="'gptq'"):
        load(directory, quantization="int4")


# ---- fastgen explain -------------------------------------------------------------------------------------------------


def explain(directory, *arguments: str) -> dict:
    shown = CliRunner().invoke(main, ["explain", str(directory), "--json", "--num-blocks", "4", *arguments])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_explain_says_what_becomes_of_the_weights(checkpoint):
    facts = explain(checkpoint("mixtral: a router"), "--quantization", "int4", "--no-packed-cache")["quantisation"]
    assert facts["scheme"] == "int4"
    assert facts["in_int4"] == "blocks.*.attn.qkv (2), blocks.*.attn.out (2), blocks.*.mlp.experts (2)"
    assert facts["in_int8"] == "head.proj"
    assert facts["in_floats"].startswith("embeddings, norms, biases; blocks.*.mlp.router (2) (")
    assert "become" in facts["packed"]
    assert facts["kept_in"].startswith("-")
    assert "quantisation" not in explain(checkpoint("mixtral: a router"))


def test_plain_torch_is_warned_about(checkpoint):
    """Which serves in float16: the library's kernels compute in others."""
    (warning,) = explain(checkpoint("llama"), "--quantization", "int4", "--dtype", "float16")["warnings"]
    assert warning.startswith("quantization: int4 runs in plain torch here")
    assert "longer than without it" in warning
    assert "\n" not in warning
    assert "warnings" not in explain(checkpoint("llama"), "--quantization", "int4")
    assert "warnings" not in explain(checkpoint("llama"), "--dtype", "float16")


def test_explain_lists_the_kernels(checkpoint):
    kernels = explain(checkpoint("llama, tied"), "--quantization", "int8")["kernels"]
    packed = [kernel["sizes"] for kernel in kernels if kernel["operation"] == "quantised_linear"]
    assert "scheme int8, in_features 160, out_features 96" in packed
    assert "linear" not in {kernel["operation"] for kernel in kernels}
