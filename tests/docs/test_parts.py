"""docs/Parts.md says what the code says, and its examples equal transformers."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch import nn

from fastgen import api as fg
from fastgen.core.config_class import realise
from fastgen.core.config_keys import NEUTRAL, SPELLINGS
from fastgen.core.hf_config import HFConfig
from fastgen.core.layers.layer import Layer
from fastgen.core.rope_config import RopeConfig, RopeType
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.reference import ACTIVATIONS, IMPLEMENTATIONS
from fastgen.testing.checkpoints import tiny_checkpoint
from fastgen.testing.distributions import FakeSite
from fastgen.testing.driver import HandDriver, load_decoder

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture
def text(repository: Path) -> str:
    return (repository / "docs" / "Parts.md").read_text()


@pytest.fixture
def load(page: Callable[[str], Any], site: FakeSite) -> Callable[[str], ModuleType]:
    """A module of the page, as printed."""

    def load(name: str) -> ModuleType:
        (site.directory / f"{name}.py").write_text(page("Parts.md").files[f"{name}.py"])
        return import_module(name)

    return load


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(table: str) -> Iterator[list[str]]:
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" |")]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_every_public_name_is_there(text: str) -> None:
    named = set(re.findall(r"\bfg\.(\w+)", text))
    assert set(fg.__all__) - named == set()
    assert named - set(fg.__all__) - {"something"} == set()


def signature(of: Any) -> list[tuple[str, Any, Any]]:
    parameters = [p for p in inspect.signature(of).parameters.values() if p.name != "self"]
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize(
    "heading", ["Parts", "Blocks", "A model", "The weight map", "Everything else in `fastgen.api`"]
)
def test_signatures(text: str, heading: str) -> None:
    calls = re.findall(r"`fg\.(\w+)\(([^`]*)\)`", section(text, heading))
    assert calls
    for name, arguments in calls:
        of = getattr(fg, name)
        try:
            printed = signature(eval(f"lambda {arguments}: 0"))
        except (NameError, SyntaxError):
            assert not arguments.count("*"), name
            continue  # a use, with arguments, and not the signature
        if all(default is inspect.Parameter.empty for _, _, default in printed) and "*" not in arguments:
            printed_names = [name for name, _, _ in printed]
            assert [name for name, _, default in signature(of) if default is inspect.Parameter.empty] == printed_names
        else:
            assert printed == signature(of), name


def test_all_parts_and_blocks_have_a_signature(text: str) -> None:
    modules = {n for n in fg.__all__ if inspect.isclass(getattr(fg, n)) and issubclass(getattr(fg, n), nn.Module)}
    tables = section(text, "Parts") + section(text, "Blocks")
    printed = {re.match(r"`fg\.(\w+)\(", row[0]) for row in rows(tables)}
    assert {match[1] for match in printed if match} == modules - {"Block", "Decoder", "Layer", "Norm"}


def part(name: str) -> nn.Module:
    """One with everything it may have."""
    norm, table, linear = fg.RMSNorm(8, 1e-6), fg.Table(16, 8), fg.Linear(8, 16)
    experts = fg.Experts(2, 8, 16, "silu")
    made: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: linear,
        "RMSNorm": lambda: norm,
        "LayerNorm": lambda: fg.LayerNorm(8, 1e-6),
        "Table": lambda: table,
        "Embed": lambda: fg.Embed(table, positions=fg.Table(9, 8)),
        "Head": lambda: fg.Head(table, tied=False),
        "Rope": lambda: fg.Rope(RopeConfig(rotary_dim=4, max_position_embeddings=64)),
        "Attention": lambda: fg.Attention(8, 2, 1, 4, q_norm=fg.RMSNorm(4, 1e-6), k_norm=fg.RMSNorm(4, 1e-6)),
        "CachedAttention": lambda: fg.CachedAttention(2, 1, 4),
        "MLP": lambda: fg.MLP(8, 16, "silu"),
        "PlainMLP": lambda: fg.PlainMLP(8, 16, "silu"),
        "Experts": lambda: experts,
        "MoE": lambda: fg.MoE(fg.Linear(8, 2), experts, 1, normalise=True),
        "SharedExpert": lambda: fg.SharedExpert(nn.Identity(), fg.MLP(8, 16, "silu"), fg.Linear(8, 1)),
    }
    return made[name]()


def test_places(text: str) -> None:
    """The paths and slots that a weight rule may name."""
    for cells in rows(section(text, "Parts")):
        if (match := re.match(r"`fg\.(\w+)\(", cells[0])) is None:
            continue
        whole = part(match[1])
        layers = {path: layer for path, layer in whole.named_modules() if isinstance(layer, Layer)}
        printed = set(quoted(cells[1]))
        if cells[1].startswith("itself"):
            assert set(layers) == {""}, match[1]
        elif match[1] == "Experts":
            assert printed == {f"[{slot}]" for slot, _ in layers[""].want()} - {"[1.up]", "[1.down]"}
        elif match[1] in ("MoE", "SharedExpert"):  # parts that hold parts
            assert printed == {name for name, _ in whole.named_children()}
        else:
            slots = {f"{p}[{slot}]" if slot else p for p, layer in layers.items() for slot, _ in layer.want()}
            assert printed == slots, match[1]


def test_blocks_take_their_attributes(text: str) -> None:
    for cells in rows(section(text, "Blocks")):
        if (match := re.match(r"`fg\.(\w+)\((.*)\)`", cells[0])) is None:
            continue
        names = match[2].split(", ")
        block = getattr(fg, match[1])(*(nn.Identity() for _ in names))
        assert [name for name, _ in block.named_children()] == names


def test_batch_fields(text: str) -> None:
    printed = {name for cells in rows(section(text, "The batch")) for name in quoted(cells[0])}
    assert printed == set(fg.Batch.__annotations__)


def test_activations(text: str) -> None:
    sentence = re.search(r"^Activations go by.*?refused\.$", text, re.DOTALL | re.MULTILINE)
    assert sentence is not None
    assert quoted(sentence[0]) == sorted(ACTIVATIONS)


def test_config_fields_spellings_and_defaults(text: str) -> None:
    table = section(text, "The config").partition("| field |")[2].partition("\n\n")[0]
    printed: set[str] = set()
    for cells in rows(table):
        fields = quoted(cells[0])
        printed |= set(fields)
        if len(fields) > 1 or fields[0].startswith(("rope", "eos")):
            continue
        field = HFConfig.model_fields[fields[0]]
        assert quoted(cells[1]) == [n for n in SPELLINGS.get(fields[0], ()) if n != fields[0]], fields
        derived = fields[0] in ("num_key_value_heads", "head_dim")
        if not derived:
            assert quoted(cells[2]) == (
                [] if field.is_required() else [repr(field.default).replace("'", '"').replace("1e-06", "1e-6")]
            )
    assert printed == set(HFConfig.model_fields)


def test_class_attributes_of_configs(text: str) -> None:
    table = section(text, "The config").partition("What you may set on the class")[2].partition("\n\n**")[0]
    printed = {name for cells in rows(table) for name in quoted(cells[0])}
    assert printed == {name for name in HFConfig.__class_vars__ if not name.startswith(("_", "model_"))}


def test_refused_flags(up_to_date: Callable[[str, str, str], None]) -> None:
    flags = ", ".join(f"`{name}`" for name in NEUTRAL)
    up_to_date("Parts.md", "flags", "\n".join(textwrap.wrap(flags, 120, break_on_hyphens=False)))


def test_rope_types(text: str) -> None:
    assert f"({', '.join(f'`{name}`' for name in get_args(RopeType))})" in text.replace("\n", " ")


def test_rope_fields(text: str) -> None:
    sentence = re.search(r"Read what you need of it:(.*?)\.\n", text, re.DOTALL)
    assert sentence is not None
    assert sorted(set(quoted(sentence[1])) - {"None"}) == sorted(RopeConfig.model_fields)


def test_decoder_weights(text: str) -> None:
    block = re.search(r"```python\nDECODER_WEIGHTS = (.*?)```", text, re.DOTALL)
    assert block is not None
    assert list(eval(block[1]).items()) == list(fg.DECODER_WEIGHTS.rules.items())
    sentence = re.search(r"`DECODER_WEIGHTS` knows\s(.*?) and none", text, re.DOTALL)
    assert sentence is not None
    assert [*quoted(sentence[1]), ""] == list(fg.DECODER_WEIGHTS.roots)


def test_links_to_sections(repository: Path) -> None:
    anchors = {}
    for page in (repository / "docs").glob("*.md"):
        seen: dict[str, int] = {}
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
            anchor = re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
            seen[anchor] = seen.get(anchor, -1) + 1
            anchors[page.name, f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor] = page
    for page in (repository / "docs").glob("*.md"):
        for target, anchor in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", page.read_text()):
            assert (target or page.name, anchor) in anchors, f"{page.name}: {target}#{anchor}"


# ---- examples --------------------------------------------------------------------------------------------------------


def assert_equals_transformers(plugin: object, config: Any, folder: Path, length: int = 40) -> None:
    """Logits at all positions, in pieces, over scattered blocks."""
    from transformers import AutoModelForCausalLM

    directory = tiny_checkpoint(folder, config, tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids = [3 + (7 * place) % 60 for place in range(length)]
    with torch.inference_mode():
        want = reference(torch.tensor([ids])).logits[0]
    with fg.registered(plugin, name="example"):
        (architecture,) = reference.config.architectures
        pins = {"adapter": {architecture: "example"}}
        driver = HandDriver(load_decoder(directory, **pins))
        got = driver.read(driver.add(ids), 7)
    assert (got - want).abs().max() < 1e-4 * max(1.0, want.abs().max().item() / 16)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_cohere(load: Callable[[str], ModuleType], tmp_path: Path, tied: bool) -> None:
    from transformers import CohereConfig

    config = CohereConfig(**SIZES, logit_scale=0.3, attention_bias=not tied, tie_word_embeddings=tied)
    assert_equals_transformers(load("fastgen_cohere"), config, tmp_path)


@pytest.mark.slow
def test_cohere2_past_its_window(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    from transformers import Cohere2Config

    config = Cohere2Config(**SIZES, sliding_window=8, logit_scale=0.3)
    assert_equals_transformers(load("fastgen_cohere"), config, tmp_path)


def test_cohere_defaults_are_transformers(load: Callable[[str], ModuleType]) -> None:
    """What the page asks of every config class."""
    from transformers import Cohere2Config, CohereConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    module = load("fastgen_cohere")
    for ours, theirs in ((module.CohereConfig, CohereConfig), (module.Cohere2Config, Cohere2Config)):
        mine, other = ours.from_raw(sizes), theirs(**sizes)
        assert mine.rope.theta == other.rope_parameters["rope_theta"]
        assert mine.eos_token_ids == {other.eos_token_id}
        assert (mine.norm_eps, mine.num_key_value_heads) == (other.layer_norm_eps, other.num_key_value_heads)
        names = "intermediate_size logit_scale max_position_embeddings tie_word_embeddings attention_bias hidden_act"
        assert [getattr(mine, n) for n in names.split()] == [getattr(other, n) for n in names.split()]
    windows = module.Cohere2Config.from_raw(sizes).layer_windows(lambda layer: (layer + 1) % 4 != 0)
    assert [w is not None for w in windows] == [
        kind == "sliding_attention" for kind in Cohere2Config(**sizes).layer_types
    ]


def test_apertus_defaults_are_transformers(load: Callable[[str], ModuleType]) -> None:
    from transformers import ApertusConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4}
    theirs = ApertusConfig(**sizes)
    ours = realise(load("fastgen_apertus_config").ApertusConfig)
    rope = ours.from_raw(sizes).rope
    assert {key: getattr(rope, key.removeprefix("rope_")) for key in theirs.rope_parameters} == theirs.rope_parameters
    given = {"rope_type": "default", "rope_theta": 5.0}
    assert ours.from_raw({**sizes, "rope_parameters": given}).rope.type == "default"
    assert ours.from_raw(sizes).eos_token_ids == {theirs.eos_token_id}
    names = "intermediate_size max_position_embeddings hidden_act attention_bias tie_word_embeddings"
    assert [getattr(ours.from_raw(sizes), n) for n in names.split()] == [getattr(theirs, n) for n in names.split()]


def test_cohere_refuses_what_it_does_not_build(load: Callable[[str], ModuleType]) -> None:
    module = load("fastgen_cohere")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(fg.UnsupportedModelError, match="use_qk_norm"):
        module.build(module.CohereConfig.from_raw({**sizes, "use_qk_norm": True}))


def test_expert_rules_fit_both_layouts(load: Callable[[str], ModuleType]) -> None:
    weights = load("expert_rules").WEIGHTS
    experts = fg.Experts(2, 8, 16, "silu")
    one = weights.find("model.layers.3.mlp.experts.1.down_proj.weight")
    assert (one.path, one.slot, one.tail) == ("blocks.3.mlp.experts", "1.down", "weight")
    assert (one.slot, one.tail) in experts.want()
    stacked = weights.find("model.layers.3.mlp.experts.gate_up_proj")
    parts = experts.spread(stacked.slot, stacked.tail, torch.empty(2, 32, 8))
    assert {place: tuple(p.shape) for place, p in parts.items()}.items() <= experts.want().items()


class PlainFamily:
    """A family around one attention of the page, and around the usual parts."""

    def __init__(
        self,
        architecture: str,
        attention: Callable[[Any, fg.Rope], nn.Module],
        weights: fg.WeightMap,
        norm: Callable[[int, float], fg.Norm] = fg.RMSNorm,
        partial: float = 1.0,
    ) -> None:
        class Config(fg.HFConfig):
            default_partial_rotary_factor: ClassVar = partial
            clip_qkv: float | None = None

        def build(c: Any) -> fg.Decoder:
            rope, tokens = fg.Rope(c.rope), fg.Table(c.vocab_size, c.hidden_size)

            def block() -> fg.Block:
                norms = [norm(c.hidden_size, c.norm_eps) for _ in "12"]
                mlp = fg.MLP(c.hidden_size, c.intermediate_size, c.hidden_act)
                return fg.PreNorm(norms[0], attention(c, rope), norms[1], mlp)

            blocks = [block() for _ in range(c.num_hidden_layers)]
            head = fg.Head(tokens, tied=False)
            return fg.Decoder(fg.Embed(tokens), blocks, norm(c.hidden_size, c.norm_eps), head)

        @fg.hookimpl
        def fastgen_models() -> list[fg.ModelSpec]:
            return [fg.ModelSpec((architecture,), Config, build, weights)]

        self.fastgen_models = fastgen_models


@pytest.mark.slow
def test_own_attention(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    from transformers import HunYuanDenseV1Config

    module = load("fastgen_hunyuan_attention")

    def attention(c: Any, rope: fg.Rope) -> nn.Module:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return module.NormAfterRope(c.hidden_size, *heads, rope, c.norm_eps)

    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    rules = {f"model.layers.*.self_attn.{theirs}": f"blocks.*.attn.{ours}" for theirs, ours in names.items()}
    family = PlainFamily("HunYuanDenseV1ForCausalLM", attention, fg.DECODER_WEIGHTS.but(rules))
    config = HunYuanDenseV1Config(**SIZES, head_dim=16, tie_word_embeddings=False)
    assert_equals_transformers(family, config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.5, None])
def test_own_projection(load: Callable[[str], ModuleType], tmp_path: Path, clip: float | None) -> None:
    """And norms without numbers of their own."""
    from transformers import OlmoConfig

    module = load("fastgen_olmo_attention")

    def attention(c: Any, rope: fg.Rope) -> fg.Attention:
        made = fg.Attention(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, rope=rope)
        assert isinstance(module.clipped(made, c.clip_qkv).qkv, module.Clipped) == (clip is not None)
        return made

    def norm(size: int, _: float) -> fg.LayerNorm:
        return fg.LayerNorm(size, 1e-5, bias=False, weight=False)

    family = PlainFamily("OlmoForCausalLM", attention, fg.DECODER_WEIGHTS, norm)
    config = OlmoConfig(**SIZES, clip_qkv=clip, tie_word_embeddings=False)
    assert_equals_transformers(family, config, tmp_path)


@pytest.mark.slow
def test_interleaved_rope_of_a_part_of_each_head(tmp_path: Path) -> None:
    """As in GLM-4, with biases."""
    from transformers import GlmConfig

    def attention(c: Any, rope: fg.Rope) -> fg.Attention:
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        return fg.Attention(c.hidden_size, *heads, rope=rope, bias=True)

    rules = {
        f"model.layers.*.self_attn.{slot}_proj": ("blocks.*.attn.qkv", fg.split_interleaved(slot)) for slot in "qk"
    }
    split = {"model.layers.*.mlp.gate_up_proj": ("blocks.*.mlp.up", fg.split_gate_up)}
    family = PlainFamily("GlmForCausalLM", attention, fg.DECODER_WEIGHTS.but({**rules, **split}), partial=0.5)
    config = GlmConfig(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=False)
    assert_equals_transformers(family, config, tmp_path)


def test_interleaved_norms_need_the_same_order() -> None:
    config = fg.HFConfig.from_raw({key: value for key, value in SIZES.items() if key != "pad_token_id"})
    rows = torch.arange(config.head_dim)
    assert fg.split_interleaved("")(rows, config)[""].tolist() == [*rows[::2].tolist(), *rows[1::2].tolist()]


def test_own_norm(load: Callable[[str], ModuleType]) -> None:
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

    reference = NemotronLayerNorm1P(16)
    nn.init.normal_(reference.weight), nn.init.normal_(reference.bias)
    mine = load("fastgen_nemotron_norm").LayerNorm1P(16, reference.eps)
    mine.load("", "weight", reference.weight.data), mine.load("", "bias", reference.bias.data)
    mine.bind(KernelTable("cpu", "float32", IMPLEMENTATIONS))
    x = torch.randn(5, 16)
    assert torch.allclose(mine.alone(x), reference(x), atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_own_layer(load: Callable[[str], ModuleType], stacked: bool) -> None:
    layer = load("fastgen_stacked").Stacked(3, 8)
    file = torch.randn(3, 8, 8)
    given = [("", file)] if stacked else [(str(number), part) for number, part in enumerate(file)]
    filled = {}
    for slot, tensor in given:
        for (place, tail), part in layer.spread(slot, "weight", tensor).items():
            filled[place, tail] = tuple(part.shape)
            layer.load(place, tail, part)
    assert filled == layer.want()
    layer.bind(KernelTable("cpu", "float32", IMPLEMENTATIONS))
    x = torch.randn(5, 8)
    assert torch.allclose(layer(x), torch.cat([x @ part for part in file], 1), atol=1e-5)


def test_every_example_is_tested(page: Callable[[str], Any], repository: Path) -> None:
    tests = (repository / "tests" / "docs" / "test_parts.py").read_text()
    for name in page("Parts.md").files:
        assert f'load("{name.removesuffix(".py")}")' in tests, name
