"""Weight maps, coverage both ways, and what happens where a checkpoint disagrees with its config."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.weight_map import DECODER_WEIGHTS, Destination, WeightMap
from fastgen.errors import CheckpointError
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.driver import HandDriver, load_decoder

pytestmark = pytest.mark.slow


TOKENS = list(range(3, 30))


@pytest.fixture
def directory(tmp_path) -> Path:
    return tiny_llama(tmp_path, tokenizer=False)


def logits(directory: Path) -> torch.Tensor:
    driver = HandDriver(load_decoder(directory))
    return driver.read(driver.add(TOKENS), len(TOKENS))


@torch.inference_mode()
def reference_logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([TOKENS])).logits[0]


def rewrite(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t.contiguous().clone() for name, t in change(tensors).items()}, file, metadata={"format": "pt"})


def test_find():
    find = DECODER_WEIGHTS.find
    assert find("model.layers.11.self_attn.k_proj.bias") == Destination("blocks.11.attn.qkv", "k", "bias")
    assert find("model.norm.weight") == Destination("norm", "", "weight")
    assert find("xmodel.norm.weight") is None
    assert find("model.layers.x.mlp.up_proj.weight") is None
    assert find("model.norm.weight.more") is None


def test_but():
    derived = DECODER_WEIGHTS.but({"model.norm": None, "model.final": "norm"}, ignore=["*.junk"])
    assert derived.find("model.norm.weight") is None
    assert derived.find("model.final.weight") == Destination("norm", "", "weight")
    assert derived.ignores("a.b.junk")
    assert not DECODER_WEIGHTS.ignores("a.b.junk")
    assert DECODER_WEIGHTS.find("model.norm.weight") is not None


def test_a_rule_keeps_its_numbers():
    with pytest.raises(ValueError, match="different number of"):
        WeightMap({"a.*.b": "c"}).find("a.1.b.weight")


ROOTS = {
    "as written": lambda n: n,
    "no root": lambda n: n.removeprefix("model."),
    "language_model.": lambda n: f"language_model.{n}",
    "model.language_model.": lambda n: n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n,
    "transformer.": lambda n: n.replace("model.", "transformer.", 1) if n.startswith("model.") else n,
}


@pytest.mark.parametrize("rename", ROOTS.values(), ids=ROOTS)
def test_a11_roots(directory, rename):
    want = logits(directory)
    rewrite(directory, lambda tensors: {rename(n): t for n, t in tensors.items()})
    assert torch.equal(logits(directory), want)


def test_a11_an_unknown_root_is_refused(directory):
    rewrite(directory, lambda tensors: {f"foo.{n}": t for n, t in tensors.items()})
    with pytest.raises(
        CheckpointError, match=r"no tensor of the checkpoint has a name.*foo\.lm_head\.weight.*and 16 more"
    ):
        load_decoder(directory)


def test_a11_recomputable_buffers_are_left_alone(directory):
    want = logits(directory)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.cos_cached": torch.ones(2),
    }
    rewrite(directory, lambda tensors: tensors | extra)
    assert torch.equal(logits(directory), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"model.layers.0.surprise.weight": torch.ones(1)}, r"nothing in the model takes: .*surprise"),
        (lambda t: t | {"model.layers.7.mlp.up_proj.weight": torch.ones(64, 32)}, r"takes: model\.layers\.7"),
        (
            lambda t: {n: v for n, v in t.items() if "1.mlp.gate" not in n},
            r"no tensor fills: blocks\.1\.mlp\.up\[gate\]",
        ),
        (lambda t: {n: v for n, v in t.items() if n != "lm_head.weight"}, r"no tensor fills: head\.proj\.weight"),
        (lambda t: t | {"model.norm.weight": torch.ones(31)}, r"model\.norm\.weight is \[31\], the model wants \[32\]"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, r"takes: .*q_proj\.bias"),
    ],
    ids=["stray part", "stray layer", "missing", "missing head", "shape", "a9 bias without the flag"],
)
def test_coverage_is_checked_both_ways(directory, change, message):
    rewrite(directory, change)
    with pytest.raises(CheckpointError, match=message):
        load_decoder(directory)


def test_a9_each_bias_counts(tmp_path):
    """Every single bias, large, reaches its own place: without it the answer is another."""
    directory = tiny_llama(tmp_path, tokenizer=False, attention_bias=True, mlp_bias=True)
    want = logits(directory)
    assert (want - reference_logits(directory)).abs().max() < 1e-4
    names = [n for n in load_file(directory / "model.safetensors") if n.endswith("bias")]
    assert len(names) == 2 * 7
    for name in random.Random(0).sample([n for n in names if "k_proj" not in n], 6):  # softmax ignores a key's bias
        kept = load_file(directory / "model.safetensors")[name]
        rewrite(directory, lambda tensors, name=name: tensors | {name: torch.zeros_like(tensors[name])})
        assert (logits(directory) - want).abs().max() > 0.1, name
        rewrite(directory, lambda tensors, name=name, kept=kept: tensors | {name: kept})


def config_says(directory: Path, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_tied_config_beside_an_equal_head(tmp_path):
    directory = tiny_llama(tmp_path, tokenizer=False, tie_word_embeddings=True)
    want = logits(directory)
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    decoder = load_decoder(directory)
    assert decoder.head.proj is None
    assert torch.equal(logits(directory), want)


def test_tied_config_beside_a_different_head(directory, caplog):
    """Both are used, as transformers does, and it is said."""
    from fastgen.config import EngineConfig
    from fastgen.core.blueprint import draw

    config_says(directory, tie_word_embeddings=True)
    assert (logits(directory) - reference_logits(directory)).abs().max() < 1e-4
    drawn = draw(directory, EngineConfig(num_blocks=1))
    assert any("different lm_head.weight" in warning for warning in drawn.warnings)


def test_fused_transform(tmp_path):
    """A rule's function takes a fused tensor apart; shapes are checked before anything is read."""
    from fastgen import api as fg
    from fastgen.models import llama

    def split(tensor, config):
        width = config.head_dim * config.num_key_value_heads
        q, k, v = tensor.split([config.head_dim * config.num_attention_heads, width, width])
        return {"q": q, "k": k, "v": v}

    weights = fg.DECODER_WEIGHTS.but({"model.layers.*.self_attn.qkv": ("blocks.*.attn.qkv", split)})

    class Fused:
        @fg.hookimpl
        def fastgen_models(self):
            return [fg.ModelSpec(("FusedForCausalLM",), llama.LlamaConfig, llama.build, weights)]

    directory = tiny_llama(tmp_path, tokenizer=False)
    want = logits(directory)

    def fuse(tensors):
        for layer in (0, 1):
            at = f"model.layers.{layer}.self_attn."
            tensors[f"{at}qkv.weight"] = torch.cat([tensors.pop(f"{at}{p}_proj.weight") for p in "qkv"])
        return tensors

    rewrite(directory, fuse)
    config_says(directory, architectures=["FusedForCausalLM"])
    with fg.registered(Fused(), name="fused"):
        assert torch.equal(logits(directory), want)
        rewrite(directory, lambda t: t | {"model.layers.0.self_attn.qkv.weight": torch.ones(65, 32)})
        with pytest.raises(CheckpointError, match=r"qkv\.weight is \[65, 32\], which the weight map cannot take apart"):
            load_decoder(directory)


def test_a_decoder_that_matches_tensors_by_itself(tmp_path):
    """It needs no rules, is asked before anything is read, and what it says on loading is among the warnings."""
    from fastgen import api as fg
    from fastgen.core.containers import Decoder
    from fastgen.models import llama

    asked: list[dict] = []

    class Selfish(Decoder):
        remarks = ("knows its own tensors",)

        def match(self, shapes):
            asked.append(shapes)
            placed = {name: DECODER_WEIGHTS.find(name) for name in shapes}
            if None in placed.values():
                raise CheckpointError("what is this?")
            return placed

    def build(config):
        whole = llama.build(config)
        return Selfish(whole.embed, whole.blocks, whole.norm, whole.head)

    class Plugin:
        @fg.hookimpl
        def fastgen_models(self):
            return [fg.ModelSpec(("SelfishForCausalLM",), llama.LlamaConfig, build, WeightMap({}))]

    directory = tiny_llama(tmp_path, tokenizer=False)
    want = logits(directory)
    config_says(directory, architectures=["SelfishForCausalLM"])
    with fg.registered(Plugin(), name="selfish"):
        assert torch.equal(logits(directory), want)
        assert asked[0]["model.norm.weight"] == (32,)
        assert "knows its own tensors" in draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1})).warnings
        rewrite(directory, lambda t: t | {"extra.weight": torch.ones(2)})
        with pytest.raises(CheckpointError, match=r"what is this\?"):
            load_decoder(directory)
