"""Adapters that are wrong in one way fail in the check for it, with a message that says where to look."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.core.plugin.conformance import FAULT
from fastgen.errors import CheckpointError
from fastgen.testing import ModelConformance, weight_checks
from fastgen.testing.conformance import _Shared
from fastgen.testing.faults import planted_faults
from fastgen.testing.subject import Subject, serving

pytestmark = pytest.mark.slow

PLAIN = {"model_type": "llama"}

ADAPTER = """
from fastgen import api as fg
from fastgen.models.llama import LlamaConfig, build

WEIGHTS = fg.DECODER_WEIGHTS

{code}

@fg.hookimpl
def fastgen_models():
    return [fg.ModelSpec(("LlamaForCausalLM",), LlamaConfig, build, WEIGHTS)]
"""


@pytest.fixture
def kit(tmp_path, monkeypatch, tmp_path_factory):
    """``kit(code, config, **attributes)``: the tests of a class for the adapter above with ``code`` in it, as a
    function that runs one: ``run("prefill") -> {check: outcome}``, or the test's AssertionError."""
    made: list[_Shared] = []

    def make(code: str = "", config: dict[str, Any] = PLAIN, source: str = ADAPTER, **attributes: Any):
        name = f"adapter_{len(made)}"
        (tmp_path / f"{name}.py").write_text(source.format(code=textwrap.dedent(code)))
        monkeypatch.delitem(sys.modules, name, raising=False)
        cls = type("TestIt", (ModelConformance,), {"entry": name, "hf_config": config, **attributes})
        shared = _Shared(cls)
        made.append(shared)

        def run(test: str) -> dict[str, str]:
            told: dict[str, str] = {}
            method = getattr(cls(), f"test_{test}")
            offered = {
                "subject": lambda: shared.subject(next(iter(cls.cases())), tmp_path_factory),
                "plugin": shared.plugin,
                "told": told,
                "tmp_path": tmp_path_factory.mktemp("it"),
            }
            names = method.__code__.co_varnames[1 : method.__code__.co_argcount]
            method(**{wanted: offered[wanted] for wanted in names})
            return told

        return run

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for shared in made:
        shared.exit.close()


CHECKS = ["weights_fill_everything", "weights_in_shards", "weights_missing_and_extra", "prefill", "chunks", "decode"]
CHECKS += ["ragged", "preempted", "prefix_hit", "sensitivity", "tied_and_untied", "registers_twice"]


def test_a_right_adapter_passes(kit):
    """The control of all others: without a fault the adapter above passes everything."""
    run = kit()
    for check in CHECKS:
        assert "fail" not in run(check).values()


WRONG_MATHS = {
    "gate and up swapped": (
        """
        WEIGHTS = WEIGHTS.but({
            "model.layers.*.mlp.gate_proj": "blocks.*.mlp.up[up]",
            "model.layers.*.mlp.up_proj": "blocks.*.mlp.up[gate]",
        })
        """,
        "first position is wrong already.*weight map.*block 0 .PreNorm. returns",
    ),
    "a norm is missing": (
        """
        right = build
        def build(c):
            decoder = right(c)
            decoder.blocks[1].norm2.forward = lambda x, delta: (x + delta, x + delta)
            return decoder
        """,
        "first position is wrong already.*norms.*look at the last block",
    ),
    "wrong eps": (
        """
        right = build
        def build(c):
            return right(c.model_copy(update={"norm_eps": c.norm_eps * 10}))
        """,
        "first position is wrong already.*eps",
    ),
    "another activation": (
        """
        right = build
        def build(c):
            return right(c.model_copy(update={"hidden_act": "gelu"}))
        """,
        "first position is wrong already.*activation",
    ),
    "another theta": (
        """
        right = build
        def build(c):
            return right(c.model_copy(update={"rope": c.rope.model_copy(update={"theta": 9000.0})}))
        """,
        "Position 0 is equal.*theta.*block 0",
    ),
    "half the rope": (
        """
        right = build
        def build(c):
            return right(c.model_copy(update={"rope": c.rope.model_copy(update={"rotary_dim": c.head_dim // 2})}))
        """,
        "Position 0 is equal.*rotary_dim",
    ),
    "keys and values of other heads": (
        """
        def swapped(tensor, config):
            return {"k": tensor.roll(config.head_dim, 0)}
        WEIGHTS = WEIGHTS.but({"model.layers.*.self_attn.k_proj": ("blocks.*.attn.qkv", swapped)})
        """,
        "Position 0 is equal.*order of key and value heads",
    ),
}


@pytest.mark.parametrize(("code", "advice"), WRONG_MATHS.values(), ids=WRONG_MATHS)
def test_wrong_maths_fails_prefill(kit, code, advice):
    run = kit(code)
    run("weights_fill_everything")
    with pytest.raises(AssertionError, match=rf"(?s)logits differ.*{advice}"):
        run("prefill")


MISTRAL = """
from fastgen import api as fg
from fastgen.models.mistral import MistralConfig, build as right

def build(c):
    return right(c.model_copy(update={{"sliding_window": {code}}}))

@fg.hookimpl
def fastgen_models():
    return [fg.ModelSpec(("MistralForCausalLM",), MistralConfig, build, fg.DECODER_WEIGHTS)]
"""
WINDOWED = {"model_type": "mistral", "sliding_window": 8}


@pytest.mark.parametrize("window", [7, 9])
def test_a_window_one_off_fails_prefill(kit, window):
    with pytest.raises(AssertionError, match=r"up to the length of the window, \d: check window="):
        kit(str(window), WINDOWED, MISTRAL)("prefill")


def test_a_forgotten_window_fails_prefill(kit):
    with pytest.raises(AssertionError, match="up to the length of the window, 8"):
        kit("None", WINDOWED, MISTRAL)("prefill")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "window of 4096"),
        ({"model_type": "mistral", "sliding_window": 40, "max_position_embeddings": 40}, "window of 40"),
    ],
)
def test_a_window_that_no_prompt_passes_is_no_pass(kit, config, what):
    run = kit("c.sliding_window", config, MISTRAL)
    with pytest.raises(AssertionError, match=f"the {what} tokens is out of the kit's reach"):
        run("prefill")
    with pytest.raises(AssertionError, match="would not notice these mistakes: window one longer"):
        run("sensitivity")


def test_a_stretched_rope_that_no_prompt_passes_is_no_pass(kit):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    with pytest.raises(AssertionError, match="the rope length of 256 tokens is out of the kit's reach"):
        kit(config={**PLAIN, "rope_parameters": rope})("prefill")


def test_a_forgotten_regime_fails_beyond_the_original_length(kit):
    code = """
    right = build
    def build(c):
        return right(c.model_copy(update={"rope": c.rope.model_copy(update={"factor": 3.0})}))
    """
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    run = kit(code, {**PLAIN, "rope_parameters": rope, "max_position_embeddings": 16})
    with pytest.raises(AssertionError, match="logits differ"):
        run("prefill")


STATEFUL = {
    "positions from the row": """
        right = build
        def build(c):
            decoder = right(c)
            rope = decoder.blocks[0].attn.rope
            turn = rope._tables
            def tables(batch, dtype):
                kept = batch.positions
                batch.positions = kept - kept[0]
                try:
                    return turn(batch, dtype)
                finally:
                    batch.positions = kept
            rope._tables = tables
            return decoder
        """,
    "a token of the last pass": """
        right = build
        def build(c):
            decoder = right(c)
            mlp, kept = decoder.blocks[0].mlp, []
            forward = mlp.forward
            def remember(x):
                mixed = forward(x)
                if kept:
                    mixed = mixed + kept.pop()
                kept.append(0.1 * mixed[-1:])
                return mixed
            mlp.forward = remember
            return decoder
        """,
}


@pytest.mark.parametrize("code", STATEFUL.values(), ids=STATEFUL)
def test_state_between_passes_fails_chunks_and_decode(kit, code):
    for check in ("chunks", "decode", "ragged"):
        with pytest.raises(AssertionError, match="something is lost or mixed up between passes"):
            kit(code)(check)


def test_one_sequence_reading_another_fails_ragged_alone(kit):
    """What a mean over the whole batch in place of the sequence does: invisible for a prompt by itself."""
    code = """
    right = build
    def build(c):
        decoder = right(c)
        embed = decoder.embed.forward
        def mixed(batch):
            stream = embed(batch)
            return stream + stream.mean(0) * (len(batch.lengths) > 1)
        decoder.embed.forward = mixed
        return decoder
    """
    run = kit(code)
    for check in ("prefill", "chunks", "decode"):
        run(check)
    for check in ("ragged", "preempted"):
        with pytest.raises(AssertionError):
            run(check)


WRONG_WEIGHTS = {
    "a transform that adds": (
        """
        WEIGHTS = WEIGHTS.but({"model.norm": ("norm", lambda tensor, config: {"": tensor + 1})})
        """,
        "model.norm.weight: what the weight map makes of it is not the same numbers",
    ),
    "a transform that loses": (
        """
        import torch
        WEIGHTS = WEIGHTS.but({"model.norm": ("norm", lambda tensor, config: {"": tensor[:1].expand(len(tensor))})})
        """,
        "model.norm.weight: what the weight map makes of it is not the same numbers",
    ),
    "a place that overlaps": (
        """
        right = build
        def build(c):
            decoder = right(c)
            qkv = decoder.blocks[0].attn.qkv
            place = qkv.place
            qkv.place = lambda slot, tail: place("k" if slot == "v" else slot, tail)
            return decoder
        """,
        r"blocks.0.attn.qkv.weight: 512 of 2048 numbers are NaN after loading",
    ),
    "a part left out": (
        """
        right = build
        def build(c):
            decoder = right(c)
            norm = decoder.norm
            norm.load = lambda slot, tail, tensor: norm.weight[1:].copy_(tensor[1:])
            return decoder
        """,
        r"norm.weight: 1 of 32 numbers are NaN after loading",
    ),
    "a buffer never filled": (
        """
        right = build
        def build(c):
            import torch
            decoder = right(c)
            decoder.register_buffer("table", torch.full((2,), float("nan")))
            return decoder
        """,
        "the buffer table is not finite",
    ),
    "a load that rounds": (
        """
        right = build
        def build(c):
            decoder = right(c)
            norm = decoder.norm
            norm.load = lambda slot, tail, tensor: norm.weight.copy_(tensor * 1.0000001)
            return decoder
        """,
        "model.norm.weight is not what norm.weight holds",
    ),
}


@pytest.mark.parametrize(("code", "message"), WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_weights_that_do_not_land_are_found(kit, code, message):
    with pytest.raises(AssertionError, match=message):
        kit(code)("weights_fill_everything")


def test_an_order_of_tensors_that_matters_is_found(kit):
    code = """
    right = build
    def build(c):
        decoder, count = right(c), []
        def counting(layer, load):
            def then(slot, tail, tensor):
                load(slot, tail, tensor * (1 + 0.01 * len(count)))
                count.append(1)
            return then
        for layer in decoder.modules():
            if isinstance(layer, fg.Layer):
                layer.load = counting(layer, layer.load)
        return decoder
    """
    with pytest.raises(AssertionError, match="what a tensor fills depends on when it comes"):
        kit(code)("weights_in_shards")


def test_a_map_that_ignores_strangers_is_found(kit):
    with pytest.raises(AssertionError, match="the weight map ignores what it does not know"):
        kit('WEIGHTS = WEIGHTS.but({}, ignore=["*stranger*"])')("weights_missing_and_extra")


def test_a_plan_that_forgives_is_found(kit, monkeypatch):
    """Were coverage not checked, or its message of no use, the kit would say so."""
    run = kit()
    run("weights_missing_and_extra")
    monkeypatch.setattr(weight_checks, "plan", lambda *args: [])
    with pytest.raises(AssertionError, match=r"a checkpoint without .* is accepted"):
        run("weights_missing_and_extra")

    def refuse(*args: object) -> None:
        raise CheckpointError("something does not fit")

    monkeypatch.setattr(weight_checks, "plan", refuse)
    with pytest.raises(AssertionError, match="the message does not name"):
        run("weights_missing_and_extra")


def test_a_head_that_is_always_tied_is_found(kit):
    code = """
    right = build
    def build(c):
        return right(c.model_copy(update={"tie_word_embeddings": True}))
    """
    config = {**PLAIN, "tie_word_embeddings": True}
    with pytest.raises(AssertionError, match=r"lm_head.weight.*Build the head by config.tie_word_embeddings"):
        kit(code, config)("tied_and_untied")
    assert kit(code, config, flip_tie=False)("tied_and_untied") == {"tied and untied": "n.a."}


def test_a_refusal_to_untie_is_not_applicable(kit):
    code = """
    right = build
    def build(c):
        if not c.tie_word_embeddings:
            raise fg.UnsupportedModelError("this family ties its head")
        return right(c)
    """
    assert kit(code, {**PLAIN, "tie_word_embeddings": True})("tied_and_untied") == {"tied and untied": "n.a."}


def test_tied_and_untied_tries_the_other(kit):
    assert kit()("tied_and_untied") == {"tied and untied": "pass"}


def test_a_heavy_entry_is_found(kit):
    with pytest.raises(AssertionError, match=r"importing adapter_0 loads torch: import what needs it inside build"):
        kit("import torch")("entry_is_light")
    kit()("entry_is_light")


def test_a_broken_entry_fails_each_check_with_its_reason(kit):
    run = kit('raise RuntimeError("no such library")')
    for check in ("prefill", "registers_twice"):
        with pytest.raises(RuntimeError, match="no such library"):
            run(check)


def test_an_unnoticed_fault_is_told(kit):
    """A soft cap so high that it does nothing: dropping it would pass, and the kit says so."""
    config = {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 1e6}
    gemma2 = "from fastgen.models.gemma2 import *\nfrom fastgen.models.gemma2 import fastgen_models{code}"
    run = kit(config=config, source=gemma2)
    run("prefill")
    with pytest.raises(AssertionError, match=r"not notice these mistakes: no soft cap of scores \(write a smaller"):
        run("sensitivity")
    run = kit(config=config, source=gemma2, not_applicable={"no soft cap of scores": "it is too high to matter"})
    assert run("sensitivity")[f"{FAULT}no soft cap of scores"] == "n.a."


def test_sensitivity_means_nothing_where_parity_fails(kit):
    with pytest.raises(AssertionError, match="before any fault is planted"):
        kit(WRONG_MATHS["wrong eps"][0])("sensitivity")


YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
EVERY_PART = [
    (
        "fastgen.models.gemma2",
        {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8},
        {
            "windows on the wrong layers",
            "window one longer",
            "window one shorter",
            "no soft cap of scores",
            "no soft cap of the logits",
            "forgotten offset",
            "no scale of the embedding",
            "swapped pre1 and post1: blocks.*",
            "dropped norm: blocks.*.post2",
            "another activation",
            "blocks in another order",
        },
    ),
    (
        "fastgen.models.qwen2_moe",
        {
            "model_type": "qwen2_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        {
            "swapped experts",
            "swapped gate and up: experts",
            "router normalised the other way",
            "no gate of the shared expert",
            "misread: blocks.*.mlp.routed.router",
            "dropped bias: blocks.*.attn.qkv[k]",
            "rope pairing",
            "shifted KV head",
        },
    ),
    (
        "fastgen.models.gpt2",
        {"model_type": "gpt2"},
        {"positions one off", "dropped bias: blocks.*.norm1", "misread: embed.positions", "wrong eps", "wrong scale"},
    ),
    (
        "fastgen.models.falcon",
        {
            "model_type": "falcon",
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
            "new_decoder_architecture": False,
        },
        {"ALiBi slopes of other heads"},
    ),
    ("fastgen.models.llama", {**PLAIN, "rope_parameters": YARN}, {"no rope scaling", "no rope", "rope pairing"}),
    (
        "fastgen.models.gemma3",
        {
            "model_type": "gemma3_text",
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"ropes on the wrong layers", "windows on the wrong layers", "dropped norm: blocks.*.attn.q_norm"},
    ),
]


@pytest.mark.parametrize(("entry", "config", "faults"), EVERY_PART, ids=[row[0] for row in EVERY_PART])
def test_faults_are_planted_and_leave_no_trace(tmp_path, entry, config, faults):
    """Each changes the logits while it is planted, and none afterwards, to the last bit."""
    with serving(entry) as record:
        subject = Subject(record, config, tmp_path)
        right = subject.prefill()
        planted = {fault.name: fault.plant for fault in planted_faults(subject.decoder)}
        assert faults <= {name for name, plant in planted.items() if plant is not None}
        assert "dropped bias: blocks.*.attn.qkv[k]" not in planted or subject.raw["model_type"] == "qwen2_moe"
        for name, plant in planted.items():
            if plant is None:
                continue
            with plant():
                assert (subject.prefill() - right).abs().max() > 1e-3, name
            assert torch.equal(subject.prefill(), right), name


def test_a_config_that_transformers_does_not_know(kit):
    with pytest.raises(ValueError, match="has no model_type 'nonesuch': give write_checkpoint and reference"):
        kit(config={"model_type": "nonesuch"})("prefill")
    with pytest.raises(ValueError, match="needs a model_type"):
        kit(config={"plain": {"hidden_size": 32}})("prefill")


def write_llama(directory: Path, config: dict[str, Any]) -> None:
    from fastgen.testing.checkpoints import write_random

    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for layer in range(2):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{norm}.weight": (32,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (32 if name in "qo" else 16, 32) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (32, 64)
    write_random(directory, config, shapes)


def llama_reference(directory: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda ids: model(torch.tensor([ids])).logits[0]


OWN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def test_flat_scores_hide_their_scale(kit):
    source = ADAPTER.replace("llama import LlamaConfig", "granite import GraniteConfig")
    source = source.replace("LlamaForCausalLM", "GraniteForCausalLM").replace("LlamaConfig", "GraniteConfig")
    small = {"model_type": "granite", "attention_multiplier": 1e-7}
    with pytest.raises(
        AssertionError, match=r"wrong scale \(scores so small that the softmax is flat hide their scale"
    ):
        kit(config=small, source=source)("sensitivity")
    assert (
        kit(config={**small, "attention_multiplier": 0.4}, source=source)("sensitivity")[f"{FAULT}wrong scale"]
        == "pass"
    )


def test_a_checkpoint_and_reference_of_the_authors_own(kit):
    own = {"write_checkpoint": staticmethod(write_llama), "reference": staticmethod(llama_reference)}
    run = kit(config=OWN, **own)
    for check in CHECKS:
        assert "fail" not in run(check).values()
    run = kit(WRONG_MATHS["another theta"][0], OWN, **own)
    with pytest.raises(AssertionError, match="Position 0 is equal"):
        run("prefill")
    run = kit(config=OWN, write_checkpoint=staticmethod(write_llama))
    with pytest.raises(ValueError, match="reference is not"):
        run("prefill")
