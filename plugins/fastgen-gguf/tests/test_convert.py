"""Converted checkpoints against transformers' own loading of the GGUF file, and against gguf's own unpacking."""

from __future__ import annotations

import ast
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastgen_gguf
import gguf
import numpy as np
import pytest
import torch
from fastgen_gguf.convert import QuickReader, convert
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastgen.api import CheckpointError, UnsupportedModelError
from fastgen.testing.driver import draw_model

Write = Callable[..., Path]
IDS = torch.tensor([[5, 80, 200, 17, 33, 90, 261, 4]])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "converted").mkdir()
    return tmp_path / "converted"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def by_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_transformers_loading_the_file(write: Write, target: Path, tied: bool) -> None:
    path = write(config={"tie_word_embeddings": tied})
    convert(path, target)
    assert torch.equal(logits(loaded(target)), logits(by_transformers(path)))
    assert ("lm_head.weight" in load_file(target / "model.safetensors")) is not tied
    assert config_of(target)["tie_word_embeddings"] is tied


def test_logits_are_those_of_the_model_written(tiny_gguf: Any, tmp_path: Path, target: Path) -> None:
    """Independent of transformers' loader: unquantised, so that heads must be in the right order."""
    model = tiny_gguf(formats={}, config={"rms_norm_eps": 1e-5}).write(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", target)
    assert torch.allclose(logits(loaded(target)), logits(model), atol=1e-6)


def test_every_value_is_exact(write: Write, target: Path) -> None:
    path = write()
    convert(path, target)
    ours = load_file(target / "model.safetensors")
    reader = gguf.GGUFReader(path)
    theirs = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    assert {t.tensor_type.name for t in reader.tensors} == {"F32", "Q8_0", "Q4_1"}
    pairs = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
    for layer in range(2):
        for there, here in pairs.items():
            expected = theirs[f"blk.{layer}.{there}.weight"]
            assert torch.equal(ours[f"model.layers.{layer}.{here}.weight"].float(), expected)
    assert torch.equal(ours["model.embed_tokens.weight"].float(), theirs["token_embd.weight"])
    assert ours["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    # Negative control: 16 bits would not have held them.
    for kind in (torch.float16, torch.bfloat16):
        assert not torch.equal(theirs["blk.0.ffn_up.weight"].to(kind).float(), theirs["blk.0.ffn_up.weight"])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")])
def test_no_larger_than_needed(write: Write, target: Path, kind: str, dtype: str) -> None:
    convert(write(formats={"": kind}, round_to=getattr(torch, dtype)), target)
    assert {str(tensor.dtype) for tensor in load_file(target / "model.safetensors").values()} == {f"torch.{dtype}"}
    assert config_of(target)["dtype"] == dtype


def test_mixed_formats_are_served_in_the_widest(write: Write, target: Path) -> None:
    convert(write(formats={"ffn": "Q4_1", "": "BF16"}), target)
    kinds = {name: tensor.dtype for name, tensor in load_file(target / "model.safetensors").items()}
    assert kinds["model.layers.1.mlp.up_proj.weight"] == torch.float32
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16
    assert config_of(target)["dtype"] == "float32"


def test_dtype_asked_for(write: Write, target: Path) -> None:
    convert(write(), target, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert config_of(target)["dtype"] == "bfloat16"


def test_biases_are_kept(tiny_gguf: Any, tmp_path: Path, target: Path) -> None:
    model = tiny_gguf(formats={}, bias=True, config={"rms_norm_eps": 1e-5}).write(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", target)
    assert torch.allclose(logits(loaded(target)), logits(model), atol=1e-6)
    assert config_of(target)["attention_bias"]
    assert config_of(target)["mlp_bias"]


# ---- rope ----------------------------------------------------------------------------------------------------------


def rope_of(directory: Path) -> dict[str, Any]:
    return config_of(directory)["rope_parameters"]


def test_rope_theta(write: Write, target: Path) -> None:
    convert(write(), target)
    assert rope_of(target) == {"rope_type": "default", "rope_theta": 5000.0}


def test_linear_rope_scaling(write: Write, target: Path) -> None:
    convert(write(extra_scalars={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}), target)
    assert rope_of(target) == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


def test_yarn_rope_scaling(write: Write, target: Path) -> None:
    scalars = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    convert(write(extra_scalars=scalars), target)
    expected = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    assert rope_of(target) == expected


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


def test_llama3_rope_scaling_out_of_its_divisors(write: Write, target: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    divisors = llama3_divisors(32, 500000.0, 8.0)
    assert divisors.min() == 1.0  # the case has kept, blended and divided pairs
    assert len(set(divisors.round(3))) > 2
    config = {"rope_parameters": rope, "head_dim": 32}
    convert(write(config=config, extra_tensors={"rope_freqs.weight": divisors}), target)
    assert rope_of(target) == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"extra_scalars": {"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 2.0}}, "'spiral'"),
        (
            {
                "extra_scalars": {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 2.0,
                    "llama.rope.scaling.yarn_beta_fast": 8.0,
                }
            },
            "yarn_beta_fast",
        ),
        ({"extra_tensors": {"rope_freqs.weight": np.array([1.0] * 7 + [8.0], np.float32)}}, "rope_freqs"),
        ({"extra_scalars": {"llama.attention.scale": 0.5}}, "attention.scale"),
        ({"extra_scalars": {"llama.attention.key_length": 32}}, "heads of 32"),
        ({"extra_tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((4, 32), np.float32)}}, "ffn_gate_exps"),
        ({"extra_tensors": {"blk.0.attn_q_norm.weight": np.zeros(16, np.float32)}}, "attn_q_norm"),
        ({"without": ("tokenizer",)}, "no tokenizer"),
        ({"architecture": "clip"}, "clip"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_converted_faithfully_is_refused(
    write: Write, target: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        convert(write(**changes), target)


# ---- tokenizer -----------------------------------------------------------------------------------------------------


def test_text_is_split_as_the_vocabulary_was_learned(write: Write, target: Path) -> None:
    """Oracle: the pre-tokenizer of the models that use this vocabulary type, as their tokenizer.json has it."""
    path = write()
    convert(path, target)
    ours = AutoTokenizer.from_pretrained(target)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "the  5 cats,   2024\n  ½ x²"
    without = reference(text).input_ids
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours(text).input_ids == reference(text).input_ids
    assert without != reference(text).input_ids  # negative control: the loader alone gets it wrong
    assert ours.decode(ours(text).input_ids) == text


def test_special_tokens_and_chat_template(write: Write, target: Path) -> None:
    convert(write(), target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert text == "<|im_start|>user\nthe<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nthe\n"


@pytest.mark.parametrize(
    ("scalars", "ends"),
    [({}, 2), ({"tokenizer.ggml.eot_token_id": 2}, 2), ({"tokenizer.ggml.eom_token_id": 3}, [2, 3])],
)
def test_all_end_tokens(write: Write, target: Path, scalars: dict[str, Any], ends: Any) -> None:
    convert(write(extra_scalars=scalars), target)
    assert config_of(target)["eos_token_id"] == 2
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == ends


# ---- bad files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.99, 0.9999])
def test_truncated_files(write: Write, target: Path, share: float) -> None:
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut off|not a GGUF"):
        convert(path, target)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a GGUF"),
        (b"PK\x03\x04 a zip file", "not a GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**60), "damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 99) + b"\0" * 64, "type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 64, "no tensors"),
    ],
)
def test_files_that_are_none(tmp_path: Path, target: Path, content: bytes, match: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        convert(tmp_path / "x.gguf", target)


def test_old_versions(tmp_path: Path, target: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        convert(tmp_path / "x.gguf", target)


def test_a_tensor_is_missing(write: Write, target: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        convert(write(without=("blk.1.ffn_down.weight",)), target)


# ---- files beside it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named_in", ["config.json", "tokenizer_config.json"])
def test_f5_code_beside_the_file_never_runs(
    write: Write, target: Path, named_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither run nor asked about: `auto_map` of a file that happens to lie there is nothing to a GGUF."""
    path = write()
    marker = path.parent / "ran"
    for module in ("configuration_x", "tokenization_x", "modeling_x"):
        (path.parent / f"{module}.py").write_text(f"open({str(marker)!r}, 'w')")
    auto_map = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoTokenizer": ["tokenization_x.XTokenizer", None],
        "AutoModelForCausalLM": "modeling_x.XModel",
    }
    (path.parent / named_in).write_text(json.dumps({"model_type": "x", "auto_map": auto_map}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user whether to run code"))
    convert(path, target)
    assert not marker.exists()
    assert config_of(target)["model_type"] == "llama"
    assert not list(target.glob("*.py"))
    assert "auto_map" not in "".join(file.read_text() for file in target.glob("*.json"))


def test_files_beside_it_change_nothing(write: Write, tmp_path: Path) -> None:
    path = write()
    results = []
    for number in range(2):
        target = tmp_path / str(number)
        target.mkdir()
        convert(path, target)
        results.append({file.name: file.read_bytes() for file in target.iterdir()})
        (path.parent / "chat_template.jinja").write_text("another")
        (path.parent / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.1}')
        (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<|eom|>"}')
        (path.parent / "adapter_config.json").write_text('{"base_model_name_or_path": "x", "peft_type": "LORA"}')
    assert results[0] == results[1]


# ---- as a plugin ---------------------------------------------------------------------------------------------------


def test_found_by_fastgen(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "cache"))
    path = write()
    files = draw_model(path).files
    assert files.origin == "format gguf"
    assert config_of(files.directory)["architectures"] == ["LlamaForCausalLM"]
    assert draw_model(path).files.origin == "format gguf, converted before"


def test_no_output_off_a_terminal(write: Write, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write()
    capfd.readouterr()
    convert(path, target)
    assert capfd.readouterr() == ("", "")


def test_the_entry_module_is_light() -> None:
    code = "import sys, fastgen_gguf; print({'torch', 'transformers', 'gguf'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_imports_the_public_interface_only() -> None:
    for file in Path(fastgen_gguf.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert (module or "").partition(".")[0] != "fastgen" or module == "fastgen.api", (file, module)


@pytest.mark.slow
@pytest.mark.real_model
def test_the_real_file(tmp_path: Path, interleave: Any) -> None:
    """SmolLM2-135M-Instruct, Q4_1: weights, tied head, end token, chat template, digits."""
    from fastgen.testing.demo_model import fetch_gguf

    path = fetch_gguf(Path(__file__).resolve().parents[3] / ".cache")
    target = tmp_path / "converted"
    target.mkdir()
    convert(path, target)
    ours = load_file(target / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    theirs = {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in QuickReader(path).tensors}
    assert len(ours) == len(theirs) == 272
    for name, tensor in ours.items():
        heads = 9 if "q_proj" in name else 3 if "k_proj" in name else 0
        expected = theirs[f"{names.get_name(name.removesuffix('.weight'))}.weight"]
        assert torch.equal(interleave(tensor.float(), heads) if heads else tensor.float(), expected), name
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.tokenize("a  5") == ["a", "ĠĠ", "5"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    generation = json.loads((target / "generation_config.json").read_text())
    assert (config_of(target)["eos_token_id"], generation["eos_token_id"]) == (2, 2)
    assert rope_of(target)["rope_theta"] == 100000.0
