"""The normalised config against transformers' own, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import LlamaConfig

from fastgen.core.config_keys import NEUTRAL
from fastgen.core.hf_config import HFConfig, read_eos_ids, read_generation_config, read_raw_config
from fastgen.errors import ConfigError, ModelNotFoundError, PluginError, UnsupportedModelError

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def read(**fields: Any) -> HFConfig:
    return HFConfig.from_raw({**SIZES, **fields})


# Files of transformers 4 and 5: what each says must come out as transformers reads it.
FILES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": None, "head_dim": None},
    {"num_key_value_heads": 2, "head_dim": 16},
    {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "intermediate_size": 48},
    {"torch_dtype": "bfloat16"},
    {"dtype": "float16"},
    {"rope_theta": 500000.0},
    {"rope_theta": 500000.0, "rope_scaling": None},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 9.0},
    {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 4096},
    {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 64,
    },
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
    },
]


@pytest.mark.parametrize("fields", FILES, ids=lambda fields: ",".join(fields) or "bare")
def test_read_as_transformers_reads_it(fields: dict[str, Any]) -> None:
    theirs = LlamaConfig(**json.loads(json.dumps({**SIZES, **fields})))
    theirs.standardize_rope_params()  # as its rotary embedding does, with every top-level key in view
    ours = read(**fields)
    names = ["vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings"]
    for name in [*names, "max_position_embeddings"]:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.torch_dtype == (str(theirs.dtype).removeprefix("torch.") if theirs.dtype else None)
    rope = theirs.rope_parameters
    assert (ours.rope.type, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    for name in ("factor", "low_freq_factor", "original_max_position_embeddings"):
        assert getattr(ours.rope, name) == rope.get(name), name


@pytest.mark.parametrize("fields", FILES, ids=lambda fields: ",".join(fields) or "bare")
def test_saved_again_by_transformers_means_the_same(fields: dict[str, Any], tmp_path: Path) -> None:
    LlamaConfig(**json.loads(json.dumps({"intermediate_size": 64, **SIZES, **fields}))).save_pretrained(tmp_path)
    again = HFConfig.from_raw(read_raw_config(tmp_path))
    ours = read(**{"intermediate_size": 64, **fields})
    for name in ours.__class__.model_fields:
        if name not in ("model_type", "bos_token_id", "eos_token_ids"):  # defaults of LlamaConfig
            assert getattr(again, name) == getattr(ours, name), name


def test_a7_a_part_of_the_head_is_turned_only_where_the_family_says_so() -> None:
    """transformers' classes of other families turn all of it, whatever the file says; others read the file."""
    for fields in ({"partial_rotary_factor": 0.5}, {"rotary_dim": 4}, {"rope_parameters": {"rotary_pct": 0.5}}):
        with pytest.raises(UnsupportedModelError, match=r"4 of 8 dimensions|rotary_pct"):
            read(**fields)
    assert read(partial_rotary_factor=1.0, rotary_dim=8).rope.rotary_dim == 8

    class Part(HFConfig):
        spellings: ClassVar = {"partial_rotary_factor": ("share",)}

    assert Part.from_raw({**SIZES, "share": 0.5, "rotary_dim": 4}).rope.rotary_dim == 4
    assert Part.from_raw(SIZES).rope.rotary_dim == 8


def test_a4_yarn_factor() -> None:
    """A null is the ratio of the lengths; a file without one says nothing that could be taken for it."""
    yarn = {"type": "yarn", "original_max_position_embeddings": 16}
    assert read(rope_scaling={**yarn, "factor": None}, max_position_embeddings=64).rope.factor == 4
    with pytest.raises(ConfigError, match="'yarn' needs 'factor'"):
        read(rope_scaling=yarn, max_position_embeddings=64)


def test_a8_head_dim() -> None:
    assert read().head_dim == 8
    assert read(head_dim=None).head_dim == 8
    assert read(head_dim=16).head_dim == read(head_dim=16).rope.rotary_dim == 16
    assert read(head_dim=16, num_attention_heads=6).head_dim == 16  # 32 / 6 does not matter then
    with pytest.raises(ConfigError, match=r"hidden_size 32 .* num_attention_heads 6"):
        read(num_attention_heads=6)


@pytest.mark.parametrize(
    "fields",
    [{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 99}, {"d_model": 32, "num_layers": 2, "num_heads": 4}],
)
def test_other_spellings(fields: dict[str, Any]) -> None:
    config = HFConfig.from_raw({"vocab_size": 64, "ffn_dim": 48, "layer_norm_epsilon": 0.25, **fields})
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 2, 4)
    assert (config.intermediate_size, config.norm_eps) == (48, 0.25)
    assert config.max_position_embeddings == fields.get("n_positions", 2048)


def test_spellings_must_agree_unless_the_family_ranks_them() -> None:
    class Ranked(HFConfig):
        spellings: ClassVar = {"hidden_act": ("hidden_activation",)}

    both = {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    with pytest.raises(ConfigError, match=r"hidden_act = 'gelu' and hidden_activation = 'gelu_pytorch_tanh'"):
        read(**both)
    assert Ranked.from_raw({**SIZES, **both}).hidden_act == "gelu_pytorch_tanh"
    assert read(dtype="float16", torch_dtype="torch.float16").torch_dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 32.5}, "hidden_size"),
        ({"hidden_size": [32]}, "hidden_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"head_dim": -8}, "head_dim"),
        ({"head_dim": 7}, "7"),
        ({"intermediate_size": 1.5}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"layer_norm_eps": -1e-6}, "layer_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_theta": "10000"}, "theta"),
        ({"rope_theta": 0}, "theta"),
        ({"rope_theta": float("inf")}, "theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "dynamic"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}}, "low_freq"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}},
            "original_max_position",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": "no"}}, "truncate"),
        ({"rope_scaling": {"type": "yarn"}}, "'factor'"),
        ({"rotary_dim": 4, "partial_rotary_factor": 0.25}, "they must agree"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.01}, "rotated"),
        ({"rotary_dim": 99}, "rotary_dim"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_f5_values_that_cannot_be_used_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        read(**fields)
    assert named in str(error.value)


class Anew(HFConfig):
    """A family that declares fields anew, without the bounds they had."""

    intermediate_size: int
    norm_eps: float = 1e-5
    max_position_embeddings: int = 64
    sliding_window: int | None = None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("intermediate_size", value) for value in (0, -1, 10**30, 2**63)),
        *(("layer_norm_eps", value) for value in (0.0, -1e-5, 1.0, 1)),
        *(("n_positions", value) for value in (0, -1, 2**31)),
        *(("sliding_window", value) for value in (10**30, -(10**30), 2**63)),
    ],
)
def test_bounds_hold_for_fields_declared_anew(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json: {key}: must .*, got {value}".replace("+", "[+]")):
        Anew.from_raw({**SIZES, "intermediate_size": 48, key: value})
    assert Anew.from_raw({**SIZES, "intermediate_size": 1, "n_positions": 1, "sliding_window": 2**31 - 1})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}, "rope beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-320}, "rope beta_slow"),
        ({"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1e308}, "rope mscale_all_dim"),
        ({"rope_type": "dynamic", "factor": 1e308}, "rope factor"),
        (
            {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "type": "su", "original_max_position_embeddings": 1},
            "needs an original_max_position_embeddings above 1",
        ),
    ],
    ids=str,
)
def test_ropes_without_a_value_are_refused(rope: dict[str, Any], message: str) -> None:
    """Where the formulas would divide by zero or overflow."""
    with pytest.raises(ConfigError, match=message):
        read(rope_scaling=rope)


def test_longrope_of_one_original_position_with_a_factor_of_its_own() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = read(rope_scaling={"type": "su", "original_max_position_embeddings": 1, "attention_factor": 2.0, **lists})
    assert rope.rope is not None
    assert rope.rope.attention_factor == 2.0


@pytest.mark.parametrize("rope_type", ["yran", "proportional", "mrope"])
def test_unknown_rope_types_are_refused(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rope_type):
        read(rope_scaling={"type": rope_type, "factor": 2.0})


@pytest.mark.parametrize("rope_type", ["longrope", "su"])
def test_longrope_needs_both_lists(rope_type: str) -> None:
    with pytest.raises(ConfigError, match="rope type 'longrope' needs 'long_factor'"):
        read(rope_scaling={"type": rope_type, "short_factor": [1.0] * 4})


def test_a_family_may_give_rope_names_of_its_own() -> None:
    class Own(HFConfig):
        spellings = {"rope_theta": ("base",), "partial_rotary_factor": ("share", "part")}
        rope_types = {"yarn": "linear"}
        original_max_position_embeddings: int = 77

    raw = {
        **SIZES,
        "base": 5,
        "rope_theta": 7,
        "part": 0.25,
        "share": 0.5,
        "rope_scaling": {"type": "yarn", "factor": 3},
    }
    rope = Own.from_raw(raw).rope
    assert rope is not None
    assert (rope.type, rope.theta, rope.rotary_dim, rope.factor) == ("linear", 5, 4, 3)
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "original_max_position_embeddings": 9}
    for more, length in (({}, 77), ({"original_max_position_embeddings": 55}, 55)):
        rope = Own.from_raw({**SIZES, "rope_scaling": {"type": "longrope", **lists}, **more}).rope
        assert rope is not None
        assert rope.original_max_position_embeddings == length


def test_a10_windows_of_layers() -> None:
    """The switch before the size, layer types before the rule, and an error where two of them contradict each other."""

    class Sliding(HFConfig):
        sliding_window: int | None = 4096
        use_sliding_window: bool = True
        layer_types: list[str] | None = None

    def windows(**fields: Any) -> list[int | None]:
        return Sliding.from_raw({**SIZES, **fields}).layer_windows(lambda layer: layer >= 1)

    assert read().layer_windows() == [None, None]
    assert windows() == [None, 4096]
    assert windows(sliding_window=4) == [None, 4]
    assert windows(sliding_window=4, use_sliding_window=False) == windows(sliding_window=None) == [None, None]
    types = ["sliding_attention", "full_attention"]
    assert windows(sliding_window=4, layer_types=types) == [4, None]
    assert windows(sliding_window=4, layer_types=["full_attention"] * 2) == [None, None]
    with pytest.raises(ConfigError, match="sliding_window is not set"):
        windows(sliding_window=None, layer_types=types)
    with pytest.raises(ConfigError, match="use_sliding_window is false"):
        windows(use_sliding_window=False, layer_types=types)
    with pytest.raises(ConfigError, match="names 3 layers, num_hidden_layers is 2"):
        windows(layer_types=[*types, "full_attention"])
    with pytest.raises(UnsupportedModelError, match="'chunked_attention'"):
        windows(layer_types=["chunked_attention", "full_attention"])


def test_defaults_of_a_family_fill_what_the_file_leaves_out() -> None:
    """Only what it does not mention: a null still means derived where numbers can be, and any name counts."""

    class Family(HFConfig):
        defaults: ClassVar = {"num_key_value_heads": 2, "head_dim": 16, "norm_eps": 1e-3, "max_position_embeddings": 99}

    config = Family.from_raw(SIZES)
    assert (config.num_key_value_heads, config.head_dim) == (2, 16)
    assert (config.norm_eps, config.max_position_embeddings) == (1e-3, 99)
    config = Family.from_raw({**SIZES, "num_key_value_heads": None, "head_dim": None, "n_ctx": 7, "rms_norm_eps": 1e-4})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.norm_eps, config.max_position_embeddings) == (1e-4, 7)
    config = Family.from_raw({**SIZES, "rms_norm_eps": None, "max_position_embeddings": None})
    assert (config.norm_eps, config.max_position_embeddings) == (1e-3, 99)


def test_unknown_rope_keys_are_refused_with_a_suggestion() -> None:
    with pytest.raises(UnsupportedModelError, match=r"atention_factor.*Did you mean 'attention_factor'"):
        read(rope_scaling={"type": "yarn", "factor": 2.0, "atention_factor": 1.0})
    assert read(rope_scaling={"type": "yarn", "factor": 2.0, "finetuned": True}).rope.factor == 2.0


def test_quantised_files_are_refused_by_method() -> None:
    with pytest.raises(UnsupportedModelError, match="'awq'"):
        read(quantization_config={"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize("name", NEUTRAL)
def test_flags_that_change_the_maths(name: str) -> None:
    """Refused at a value that does something; taken at a neutral one, and by a class that has the field."""

    class Knows(HFConfig):
        __annotations__ = {name: Any}

    with pytest.raises(UnsupportedModelError, match=rf"{name} = 3"):
        read(**{name: 3})
    for value in (None, *NEUTRAL[name]):
        assert read(**{name: value}).hidden_size == 32
    assert getattr(Knows.from_raw({**SIZES, name: 3}), name) == 3


def test_sliding_window_that_is_switched_off_is_neutral() -> None:
    assert read(sliding_window=4096, use_sliding_window=False).hidden_size == 32
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        read(sliding_window=4096, use_sliding_window=True)
    assert read(layer_types=["full_attention"] * 2).num_hidden_layers == 2
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read(layer_types=["full_attention", "sliding_attention"])


def test_nested_rope_is_for_families_that_say_so() -> None:
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {}}
    with pytest.raises(UnsupportedModelError, match=r"differ by layer type .*'sliding_attention'.*HFConfig"):
        read(rope_parameters=nested)


def test_a_multimodal_file_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="text_config"):
        HFConfig.from_raw({"text_config": SIZES})


class FamilyConfig(HFConfig):
    default_rope_theta = 1e6
    default_partial_rotary_factor = 0.5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 4096


def test_a_family_has_its_own_defaults_and_fields() -> None:
    """A7: a factor that is the family's default is nowhere in the file. A null means "none" where that is a value."""
    config = FamilyConfig.from_raw(SIZES)
    assert (config.rope.theta, config.rope.rotary_dim, config.tie_word_embeddings) == (1e6, 4, True)
    assert FamilyConfig.from_raw({**SIZES, "attention_bias": None}).attention_bias is False
    assert config.sliding_window == 4096
    assert FamilyConfig.from_raw({**SIZES, "sliding_window": None}).sliding_window is None
    with pytest.raises(ConfigError, match="attention_bias"):
        FamilyConfig.from_raw({**SIZES, "attention_bias": "no"})


def test_a_family_without_rope() -> None:
    class Learned(HFConfig):
        has_rope = False

    assert Learned.from_raw({**SIZES, "rope_scaling": {"type": "unknown"}, "head_dim": 7}).rope is None


@pytest.mark.parametrize(
    ("value", "expected"), [(None, set()), (5, {5}), ([5, 6], {5, 6}), ([], set()), (-1, set()), (0, {0})]
)
def test_a19_eos_may_be_a_number_a_list_or_nothing(value: Any, expected: set[int]) -> None:
    assert read(eos_token_id=value).eos_token_ids == expected
    assert read_eos_ids({"eos_token_id": value}, "generation_config.json") == expected


def test_reading_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_raw_config(tmp_path)
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 0}')
    assert read_raw_config(tmp_path) == {"a": 1}
    assert read_generation_config(tmp_path) == {"top_k": 0}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', "[" * 100_000, '"text"'])
def test_files_that_are_not_json_objects(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_raw_config(tmp_path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_raw_config(tmp_path)


def test_f5_auto_map_is_data_only(tmp_path: Path) -> None:
    """Code named by auto_map is never imported: the file is read as JSON."""
    marker = tmp_path / "ran"
    (tmp_path / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {"AutoConfig": "configuration_x.XConfig"}
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "auto_map": auto_map}))
    assert HFConfig.from_raw(read_raw_config(tmp_path)).hidden_size == 32
    assert not marker.exists()


# ---- ropes that differ by the kind of layer, and nested configs ------------------------------------------------------


class LocalConfig(HFConfig):
    default_rope_theta = 1e6
    local_rope_theta = ("rope_local_base_freq", 1e4)
    nested_in = "text_config"


FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, ("default", 1e6), ("default", 1e4)),
        ({"rope_theta": 5.0, "rope_local_base_freq": 7.0}, ("default", 5.0), ("default", 7.0)),
        ({"rope_theta": 5.0, "rope_scaling": LINEAR}, ("linear", 5.0), ("default", 1e4)),
        (
            {"rope_parameters": {FULL: {"rope_theta": 3.0, **LINEAR}}, "rope_theta": 5.0},
            ("linear", 3.0),
            ("default", 1e4),
        ),
        ({"rope_parameters": {FULL: LINEAR, SLIDING: None}, "rope_theta": 5.0}, ("linear", 5.0), ("default", 1e4)),
        ({"rope_parameters": {SLIDING: {"rope_theta": None, **LINEAR}}}, ("default", 1e6), ("linear", 1e4)),
        ({"rope_parameters": {FULL: {"rope_theta": 3.0}}, "rope_scaling": LINEAR}, ("linear", 3.0), ("default", 1e4)),
    ],
)
def test_a7_ropes_by_kind(fields: dict[str, Any], full: tuple[str, float], sliding: tuple[str, float]) -> None:
    c = LocalConfig.from_raw({**SIZES, **fields})
    assert c.rope is None
    found = {kind: (rope.type, rope.theta) for kind, rope in c.rope_by_layer_type.items()}
    assert found == {FULL: full, SLIDING: sliding}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, UnsupportedModelError, "rope_parameters has 'rope_type'"),
        ({"rope_parameters": {"chunked_attention": LINEAR}}, UnsupportedModelError, "has 'chunked_attention'"),
        ({"rope_parameters": {FULL: 3}}, ConfigError, r"rope_parameters\.full_attention must be an object, got 3"),
        ({"rope_scaling": "linear"}, ConfigError, "rope_scaling must be an object, got 'linear'"),
    ],
)
def test_ropes_by_kind_that_cannot_be_read(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LocalConfig.from_raw({**SIZES, **fields})


def test_nested_config() -> None:
    """The nested one, but what the outer one says of the whole model; what is at neither place is the class's."""
    nested = {**SIZES, "rms_norm_eps": 1e-5, "eos_token_id": 1, "dtype": "float32", "tie_word_embeddings": False}
    outer = {"architectures": ["X"], "eos_token_id": [1, 5], "torch_dtype": "bfloat16", "tie_word_embeddings": None}
    c = LocalConfig.from_raw({**outer, "text_config": nested, "hidden_size": 7, "vision_config": {"hidden_size": 9}})
    assert (c.hidden_size, c.norm_eps, c.architectures) == (32, 1e-5, ("X",))
    assert (c.eos_token_ids, c.torch_dtype, c.tie_word_embeddings) == ({1, 5}, "bfloat16", False)
    assert LocalConfig.from_raw(SIZES).hidden_size == 32  # a flat file is read as ever


def test_nested_config_is_refused_where_the_family_does_not_serve_it() -> None:
    with pytest.raises(UnsupportedModelError, match="nested under text_config"):
        HFConfig.from_raw({"architectures": ["X"], "text_config": SIZES})


def test_nested_flags_that_change_the_maths_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention = True"):
        LocalConfig.from_raw({"text_config": {**SIZES, "use_bidirectional_attention": True}})


# ---- what a family's class says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("defaults", {"num_kv_heads": 2}, "defaults names 'num_kv_heads', which is no field of it"),
        ("defaults", {"norm_epss": 1e-5}, "Did you mean 'norm_eps'"),
        ("spellings", {"hidden_dim": ("dim",)}, "spellings names 'hidden_dim', which is no field of it"),
    ],
)
def test_options_that_name_no_field_are_refused(name, options, message):
    with pytest.raises(PluginError, match=message):
        type("Foo", (HFConfig,), {name: options, "__annotations__": {name: "ClassVar"}, "__module__": __name__})


@pytest.mark.parametrize(
    ("said", "ids"),
    [({}, {7}), ({"eos_token_id": None}, set()), ({"eos_token_id": 3}, {3}), ({"eos_token_id": [3, 4]}, {3, 4})],
)
def test_end_tokens_of_the_class_count_where_the_file_is_silent(said, ids):
    class Foo(HFConfig):
        defaults: ClassVar = {"eos_token_ids": frozenset({7})}

    class Bar(HFConfig):
        eos_token_ids: frozenset[int] = frozenset({7})

    raw = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, **said}
    assert Foo.from_raw(raw).eos_token_ids == Bar.from_raw(raw).eos_token_ids == ids
