"""A17: quantised checkpoints are refused before a weight is read, whatever place tells that they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.quantization_config import QuantizationMethod

from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.checkpoint import Checkpoint
from fastgen.core.hf_config import HFConfig
from fastgen.core.quantised import quantised_tensor, refuse_quantised
from fastgen.errors import CheckpointError, ConfigError, FastgenError, UnsupportedModelError
from fastgen.testing.checkpoints import tiny_llama

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.0.mlp.down_proj"
METHODS = [*(method.value for method in QuantizationMethod), "bitsandbytes_4bit", "exl2", "modelopt", "new"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("plain"), tokenizer=False)


@pytest.fixture
def model(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, whose weights nobody may read."""

    def stream(self: Checkpoint, names: Any = None) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(Checkpoint, "stream", stream)
    shutil.copytree(plain, tmp_path / "model")
    return tmp_path / "model"


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(FastgenError) as caught:
        draw(directory, EngineConfig.of({"device": "cpu", "num_blocks": 1, **options}))
    return str(caught.value)


def says(directory: Path, **fields: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return directory


def holds(directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = directory / "model.safetensors"
    save_file({name: t.clone() for name, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})
    return directory


def instead(**parts: torch.Tensor) -> Callable[[Tensors], Tensors]:
    """One layer's matrix replaced by what a method keeps of it; ``__`` stands for a dot."""
    named = {f"{DOWN}.{name.replace('__', '.')}": tensor for name, tensor in parts.items()}
    return lambda tensors: {n: t for n, t in tensors.items() if n != f"{DOWN}.weight"} | named


def test_a17_the_control_is_not_refused(model: Path) -> None:
    drawn = draw(model, EngineConfig.of({"device": "cpu", "num_blocks": 1}))
    assert drawn.placements


# ---- config.json says so ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a17_every_method_is_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"method '{re.escape(method)}'.*use the unquantised checkpoint"):
        refuse_quantised({"quantization_config": {"quant_method": method, "bits": 4}})


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "awq with modules left out": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["layers.1", "lm_head"]}},
        "method 'awq'",
    ),
    "fp8 in blocks": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]}},
        "method 'fp8'",
    ),
    "compressed tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        "method 'compressed-tensors', format 'float-quantized'",
    ),
    "compressed tensors, old key": (
        {"compression_config": {"quant_method": "sparseml", "format": "int-quantized"}},
        "compression_config, method 'sparseml'",
    ),
    "no method": ({"quantization_config": {"load_in_4bit": True}}, "quantization_config, of no known method"),
    "mlx": ({"quantization": {"group_size": 64, "bits": 4}}, "quantization, 4 bits"),
    "mlx, both keys": (
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
        "quantization_config, 4 bits",
    ),
    "tensorrt": ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "quant_algo 'FP8'"),
    "a name": ({"quantization_config": "gptq"}, "quantization_config, 'gptq'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a17_the_config_says_so(model: Path, case: str) -> None:
    fields, named = CONFIGS[case]
    text = refusal(says(model, **fields))
    assert named in text
    assert "use the unquantised checkpoint" in text


@pytest.mark.parametrize("nothing", [None, {}, {"quant_algo": None, "kv_cache_quant_algo": None}])
def test_settings_that_quantise_nothing(nothing: Any) -> None:
    refuse_quantised({"quantization_config": nothing, "quantization": nothing, "compression_config": nothing})


def test_a_family_that_reads_the_settings_is_not_refused() -> None:
    class Knows(HFConfig):
        quantization_config: dict[str, Any]

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"quant_method": "fp8"}
    assert Knows.from_raw({**sizes, "quantization_config": settings}).quantization_config == settings


# ---- a file beside it says so ----------------------------------------------------------------------------------------

BESIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "by GPTQ, 4 bits"),
    "awq": ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4}, "by AWQ, 4 bits"),
    "auto-round": ("quantization_config.json", {"bits": 2, "quant_method": "auto-round"}, "method 'auto-round'"),
    "modelopt": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        "by ModelOpt, quant_algo 'NVFP4'",
    ),
    "modelopt, cache alone": (
        "hf_quant_config.json",
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        "kv_cache_quant_algo 'FP8'",
    ),
    "quanto": ("quanto_qmap.json", {DOWN: {"weights": "qint8", "activations": "none"}}, "by Quanto"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_a17_a_file_beside_a_silent_config_says_so(model: Path, case: str) -> None:
    name, content, named = BESIDE[case]
    (model / name).write_text(json.dumps(content))
    text = refusal(model)
    assert named in text
    assert name in text
    assert "use the unquantised checkpoint" in text
    assert "remove that file" in text


def test_a_file_beside_that_quantises_nothing(model: Path) -> None:
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": null}}')
    draw(model, EngineConfig.of({"device": "cpu", "num_blocks": 1}))


def test_a_file_beside_that_cannot_be_read(model: Path) -> None:
    (model / "quantize_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"quantize_config\.json is not valid JSON"):
        draw(model, EngineConfig.of({"device": "cpu", "num_blocks": 1}))


# ---- only the tensors say so -----------------------------------------------------------------------------------------

HIDDEN, WIDTH = 32, 64
I32, I8, U8, FLOAT, F8 = torch.int32, torch.int8, torch.uint8, torch.float16, torch.float8_e4m3fn
TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "gptq": (
        instead(
            qweight=torch.ones(WIDTH // 8, HIDDEN, dtype=I32),
            qzeros=torch.ones(1, HIDDEN // 8, dtype=I32),
            scales=torch.ones(1, HIDDEN, dtype=FLOAT),
            g_idx=torch.zeros(WIDTH, dtype=I32),
        ),
        "GPTQ or AWQ",
    ),
    "awq, one layer left out": (
        instead(
            qweight=torch.ones(WIDTH, HIDDEN // 8, dtype=I32),
            qzeros=torch.ones(2, HIDDEN // 8, dtype=I32),
            scales=torch.ones(2, HIDDEN, dtype=FLOAT),
        ),
        "GPTQ or AWQ",
    ),
    "scales alone": (lambda t: t | {f"{DOWN}.scales": torch.ones(1, HIDDEN)}, "down_proj.scales"),
    "fp8 with scales": (
        instead(weight=torch.ones(HIDDEN, WIDTH).to(F8), weight_scale_inv=torch.ones(8, 16)),
        "stored as F8_E4M3",
    ),
    "fp8 without": (instead(weight=torch.ones(HIDDEN, WIDTH).to(F8)), "stored as F8_E4M3"),
    "fp8 said to be bytes": (instead(weight=torch.ones(HIDDEN, WIDTH, dtype=U8)), "stored as uint8"),
    "fp8 made wide, scales kept": (
        instead(weight=torch.ones(HIDDEN, WIDTH), weight_scale_inv=torch.ones(8, 16)),
        "weight_scale_inv",
    ),
    "compressed tensors": (
        instead(
            weight_packed=torch.ones(HIDDEN, WIDTH // 8, dtype=I32),
            weight_scale=torch.ones(HIDDEN, 1),
            weight_shape=torch.tensor([HIDDEN, WIDTH]),
        ),
        "compressed-tensors",
    ),
    "w8a8": (instead(weight=torch.ones(HIDDEN, WIDTH, dtype=I8), weight_scale=torch.ones(HIDDEN, 1)), "weight_scale"),
    "nvfp4": (
        instead(
            weight=torch.ones(HIDDEN, WIDTH // 2, dtype=U8),
            weight_scale_2=torch.ones(()),
        ),
        "weight_scale_2",
    ),
    "bitsandbytes 8": (
        instead(weight=torch.ones(HIDDEN, WIDTH, dtype=I8), SCB=torch.ones(HIDDEN)),
        "bitsandbytes",
    ),
    "bitsandbytes 4": (
        instead(
            weight=torch.ones(HIDDEN * WIDTH // 2, 1, dtype=U8),
            weight__absmax=torch.ones(32),
            weight__quant_state__bitsandbytes__nf4=torch.ones(90, dtype=U8),
        ),
        "bitsandbytes",
    ),
    "bitnet": (instead(weight=torch.ones(HIDDEN // 4, WIDTH, dtype=U8), weight_scale=torch.ones(1)), "weight_scale"),
    "hqq": (instead(W_q=torch.ones(HIDDEN, WIDTH // 2, dtype=U8), scale=torch.ones(1), zero=torch.ones(1)), "HQQ"),
    "quanto": (
        instead(weight___data=torch.ones(HIDDEN, WIDTH, dtype=I8), weight___scale=torch.ones(HIDDEN, 1)),
        "Quanto",
    ),
    "mlx": (
        instead(
            weight=torch.ones(HIDDEN, WIDTH // 8, dtype=torch.uint32),
            scales=torch.ones(HIDDEN, 1),
            biases=torch.ones(HIDDEN, 1),
        ),
        "U32",
    ),
    "keys and values scaled": (
        lambda t: t | {"model.layers.0.self_attn.k_scale": torch.ones(1)},
        "self_attn.k_scale, as weights quantised by FP8",
    ),
    "aqlm": (instead(codes=torch.ones(4, 4, 2, dtype=I8), codebooks=torch.ones(2, 256, 1, 8)), "AQLM"),
    "bytes alone": (lambda t: t | {"model.norm.weight": torch.ones(HIDDEN, dtype=I8)}, "stored as int8"),
    "one tensor of four": (lambda t: t | {"model.norm.weight": torch.ones(HIDDEN // 4, dtype=U8)}, "stored as uint8"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a17_the_tensors_alone_say_so(model: Path, case: str) -> None:
    change, named = TENSORS[case]
    text = refusal(holds(model, change))
    assert named in text
    assert "quantised" in text
    assert "use the unquantised checkpoint" in text


def test_a17_a_tensor_missing_from_a_quantised_checkpoint(model: Path) -> None:
    """A2 (f): what is missing does not hide what is quantised, nor the other way round."""
    change, _ = TENSORS["gptq"]
    holds(model, lambda tensors: {n: t for n, t in change(tensors).items() if n != f"{DOWN}.scales"})
    assert "quantised by GPTQ or AWQ" in refusal(model)


def test_a17_bin_files(model: Path) -> None:
    tensors = {**load_file(model / "model.safetensors"), f"{DOWN}.weight": torch.ones(HIDDEN, WIDTH).to(F8)}
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    text = refusal(model, load_bin=True)
    assert "stored as float8_e4m3fn" in text
    assert "use the unquantised checkpoint" in text


def test_other_misfits_are_not_called_quantised(model: Path) -> None:
    """The control: plain float tensors that fit nothing keep their own message."""
    text = refusal(holds(model, lambda tensors: tensors | {f"{DOWN}.surprise": torch.ones(3)}))
    assert "quantised" not in text
    assert f"{DOWN}.surprise" in text


@pytest.mark.parametrize(
    "name",
    [
        *("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj_bias", "lm_head.weight"),
        *("model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.self_attn.sinks", "model.norm.bias"),
    ],
)
def test_names_of_plain_tensors(name: str) -> None:
    assert quantised_tensor({name: "bfloat16"}) is None


def test_a17_asking_for_a_quantisation_is_refused(model: Path) -> None:
    """No option asks for one; a word that means nothing here is an error, not ignored."""
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig.of({"quantization": "int8-prequantised"})


def test_a17_a_wrong_header_is_refused_by_the_reader_first(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*F8_E4M3.*use the unquantised checkpoint"):
        Checkpoint.open(holds(model, TENSORS["fp8 without"][0]))
