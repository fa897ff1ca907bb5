"""Packed weights in the user's cache: mapped instead of packed again, whole or not at all, whoever else tries."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fastgen
from fastgen.core import blueprint, loading
from fastgen.core.cache_entries import locked
from fastgen.core.engine import Engine
from fastgen.core.plugin.loader import PluginRecord
from fastgen.core.quant import Packing, packed_cache
from fastgen.core.weight_map import split_qkv
from fastgen.testing.checkpoints import tiny_llama
from fastgen.testing.driver import HandDriver, draw_model, load_decoder, without_memory
from fastgen.types import SamplingParams

WEIGHTS_LEFT = {"model.embed_tokens.weight", "model.norm.weight"} | {
    f"model.layers.{layer}.{norm}_layernorm.weight" for layer in (0, 1) for norm in ("input", "post_attention")
}
"""What of a Llama is read where packed weights are there."""


@pytest.fixture(autouse=True)
def _own(cache: Path) -> None:
    """Every test here has a cache of its own."""


@pytest.fixture
def model(checkpoint, tmp_path: Path) -> Path:
    """A Llama that a test may change."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


@pytest.fixture
def read(monkeypatch) -> list[set[str]]:
    """For each load, the checkpoint's tensors that it read."""
    loads: list[set[str]] = []
    real = loading.load

    def load(model, placements, config, source, **told):
        loads.append({placement.name for placement in placements})
        real(model, placements, config, source, **told)

    monkeypatch.setattr(loading, "load", load)
    return loads


def logits(directory: Path, scheme: str = "int8", **options) -> torch.Tensor:
    driver = HandDriver(load_decoder(directory, quantization=scheme, **options))
    rng = random.Random(0)
    ids = [rng.randrange(3, 64) for _ in range(30)]
    return driver.run([(driver.add(ids), len(ids))])[0]


def files(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def scramble(directory: Path) -> None:
    """Change the weights and neither the size nor the date of their file, where the key does not look."""
    file = directory / "model.safetensors"
    stat, content = file.stat(), bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    entry = json.loads(content[8:start])["model.layers.0.mlp.down_proj.weight"]
    begin, end = (start + offset for offset in entry["data_offsets"])
    quarter = begin + (end - begin) // 4
    content[quarter : quarter + 4000] = os.urandom(4000)
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


# ---- the second start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_second_start_maps_what_the_first_packed(checkpoint, cache, family, scheme, read, caplog):
    directory = checkpoint(family)
    first, second = logits(directory, scheme), logits(directory, scheme)
    assert torch.equal(first, second)
    assert read[1] < read[0]
    assert torch.equal(first, logits(directory, scheme, packed_cache=False))
    assert [file.suffix for file in files(cache)] == [".safetensors"]
    assert warnings(caplog) == []


def test_float_weights_are_not_read(model, read):
    first = logits(model)
    scramble(model)
    assert torch.equal(logits(model), first)
    assert not torch.equal(logits(model, packed_cache=False), first)
    assert read[1] == WEIGHTS_LEFT
    assert read[2] == read[0] > WEIGHTS_LEFT


def test_biases_are_read(checkpoint, read):
    directory = checkpoint("gpt2: tied, transposed, biases")
    logits(directory)
    logits(directory)
    assert {name for name in read[1] if name.endswith("c_fc.bias")} != set()
    assert {name for name in read[1] if name.endswith("c_fc.weight")} == set()


def test_what_is_mapped_is_private(model, cache):
    first = logits(model)
    before = files(cache)[0].read_bytes()
    mapped = load_decoder(model, quantization="int8")
    mapped.get_submodule("head.proj").weight.zero_()
    assert files(cache)[0].read_bytes() == before
    assert torch.equal(logits(model), first)


def test_the_file_is_safetensors_with_aligned_tensors(model, cache):
    logits(model)
    (file,) = files(cache)
    with safe_open(file, framework="pt") as reader:
        assert reader.metadata() == {"format": "fastgen packed weights 1"}
        assert "blocks.0.mlp.up.weight" in reader.keys()  # noqa: SIM118
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    starts = [8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]
    assert {start % 64 for start in starts} == {0}
    packed = load_decoder(model, quantization="int8", packed_cache=False).get_submodule("blocks.0.mlp.up").weight
    assert torch.equal(load_file(file)["blocks.0.mlp.up.weight"][0, : len(packed)], packed)


def test_it_can_be_turned_off(model, cache):
    logits(model, packed_cache=False)
    assert not cache.exists()


# ---- whose it is -----------------------------------------------------------------------------------------------------


def test_schemes_and_dtypes_lie_side_by_side(model, cache, read):
    for _ in range(2):
        for scheme, dtype in (("int8", "float32"), ("int4", "float32"), ("int8", "bfloat16")):
            logits(model, scheme, dtype=dtype)
    assert len(files(cache)) == 3
    assert [names == WEIGHTS_LEFT for names in read] == [False] * 3 + [True] * 3


def test_a_copy_elsewhere_finds_the_same_file(model, cache, tmp_path, read):
    logits(model)
    logits(shutil.copytree(model, tmp_path / "another name"))  # keeps dates
    assert len(files(cache)) == 1
    assert read[1] == WEIGHTS_LEFT


def test_a_changed_checkpoint_is_packed_anew_and_the_old_file_goes(model, cache):
    first = logits(model)
    (before,) = files(cache)
    another = tiny_llama(model.parent / "another", seed=7, tokenizer=False, hidden_size=96, intermediate_size=160)
    shutil.copy(another / "model.safetensors", model)
    assert not torch.allclose(logits(model), first, atol=0.1)
    (after,) = files(cache)
    assert after != before


def test_another_fine_tune_of_the_same_size_and_date(model, cache):
    """Images are often built with all dates alike."""
    another = tiny_llama(model.parent / "another", seed=7, tokenizer=False, hidden_size=96, intermediate_size=160)
    for directory in (model, another):
        os.utime(directory / "model.safetensors", (1, 1))
    assert (model / "model.safetensors").stat().st_size == (another / "model.safetensors").stat().st_size
    assert not torch.allclose(logits(model), logits(another), atol=0.1)
    assert torch.equal(logits(another), logits(another, packed_cache=False))
    assert len(files(cache)) == 2


def test_another_layout_of_the_kernels_is_not_mistaken(model, cache, monkeypatch, read):
    first = logits(model)
    for kernel in {type(m.kernel) for p in plan_parts(model) for m in p.matrices.values()}:
        monkeypatch.setattr(kernel, "layout", lambda *_: "another-9")
    (before,) = files(cache)
    assert torch.equal(logits(model), first)
    assert read[1] == read[0]
    (after,) = files(cache)  # the superseded one is gone
    assert after != before


def plan_parts(directory: Path):
    return draw_model(directory, quantization="int8").quantisation.parts


def test_a_corrected_weight_map_packs_anew(model, monkeypatch, read):
    first = logits(model)
    real = blueprint.prepare

    def swapped(config, checkpoint, weights):
        attention = "model.layers.*.self_attn"
        slots = {f"{attention}.k_proj": "blocks.*.attn.qkv[v]", f"{attention}.v_proj": "blocks.*.attn.qkv[k]"}
        return real(config, checkpoint, weights.but(slots))

    monkeypatch.setattr(blueprint, "prepare", swapped)
    again = logits(model)
    assert read[1] == read[0]
    assert not torch.allclose(again, first, atol=0.1)
    assert torch.equal(again, logits(model, packed_cache=False))


def test_another_transform_that_fills_the_same_places_packs_anew(checkpoint, monkeypatch, read):
    """Of Phi-3, whose queries, keys and values are one tensor in the file."""
    directory = checkpoint("phi3: fused")
    first = logits(directory)
    real = blueprint.prepare

    def values_first(tensor, config):
        parts = split_qkv(tensor, config)
        return {**parts, "k": parts["v"], "v": parts["k"]}

    def swapped(config, checkpoint, weights):
        rule = {"model.layers.*.self_attn.qkv_proj": ("blocks.*.attn.qkv", values_first)}
        return real(config, checkpoint, weights.but(rule))

    monkeypatch.setattr(blueprint, "prepare", swapped)
    assert not torch.allclose(logits(directory), first, atol=0.1)
    assert read[1] == read[0]


def test_another_version_of_fastgen_or_of_the_plugin_packs_anew(model, cache, monkeypatch, read):
    logits(model)
    monkeypatch.setattr(fastgen, "__version__", "99.0.0")
    logits(model)
    monkeypatch.setattr(PluginRecord, "version", "99.0.0")
    logits(model)
    logits(model)
    assert [names == WEIGHTS_LEFT for names in read] == [False, False, False, True]
    assert len(files(cache)) == 1


# ---- elsewhere than on the CPU ---------------------------------------------------------------------------------------


def test_mapped_weights_follow_the_model_to_its_device(model):
    """To torch's meta device, which every machine has."""
    logits(model)
    drawn = draw_model(model, quantization="int8")
    assert drawn.quantisation is not None
    elsewhere = without_memory(drawn.spec.load().build, drawn.model_config)
    plugin = drawn.registry.record(drawn.spec.plugin).label
    packing = Packing(
        drawn.quantisation, elsewhere, drawn.model_config, drawn.checkpoint, name=drawn.files.name, plugin=plugin
    )
    assert {placement.name for placement in packing.begin(drawn.placements)} == WEIGHTS_LEFT
    assert elsewhere.get_submodule("head.proj").weight.dtype == torch.uint8
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_where_packed_weights_lie_is_logged(model, cache, caplog):
    caplog.set_level(logging.INFO, logger="fastgen")
    logits(model)
    logits(model)
    (file,) = files(cache)
    written, mapped = (record.message for record in caplog.records if "packed weights" in record.message)
    assert re.fullmatch(rf"packed weights kept in {re.escape(str(file))} \(0\.\d MiB\): .*", written)
    assert re.fullmatch(rf"packed weights mapped from {re.escape(str(file))} \(0\.\d MiB\)", mapped)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(64))


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[20:60] = os.urandom(40)
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def another_model(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"blocks.0.attn.out.weight"', b'"blocks.9.attn.out.weight"', 1))


def another_shape(file: Path) -> None:
    content = file.read_bytes()
    assert b'"shape": [1, ' in content
    file.write_bytes(content.replace(b'"shape": [1, ', b'"shape": [2, ', 1))


@pytest.mark.parametrize("damage", [cut, lengthen, garble, empty, another_model, another_shape])
def test_a_damaged_file_is_packed_anew(model, cache, damage, read, caplog):
    first = logits(model)
    (file,) = files(cache)
    whole = file.read_bytes()
    damage(file)
    assert torch.equal(logits(model), first)
    (warning,) = warnings(caplog)
    assert str(file) in warning
    assert "damaged" in warning
    assert file.read_bytes() == whole
    assert torch.equal(logits(model), first)
    assert [names == WEIGHTS_LEFT for names in read] == [False, False, True]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_a_full_disk_costs_one_warning(model, cache, monkeypatch, caplog, when):
    first = logits(model, packed_cache=False)
    if when == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    else:
        monkeypatch.setattr(packed_cache, "sync", full)
    assert torch.equal(logits(model), first)
    (warning,) = warnings(caplog)
    assert "no space left" in warning
    assert "FASTGEN_CACHE" in warning
    assert files(cache) == []


def test_a_cache_that_cannot_be_written(model, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "file"))
    logits(model)
    (warning,) = warnings(caplog)
    assert "could not be kept" in warning


def test_what_a_dead_process_left_is_tidied(model, cache):
    cache.mkdir(parents=True)
    (cache / "gone-int8-1.partial").write_bytes(b"half")
    (cache / "gone-int8-1.lock").touch()
    (cache / "somebody-elses.txt").touch()
    logits(model)
    assert {file.suffix for file in files(cache)} == {".safetensors", ".txt"}


def test_while_another_process_writes_it_is_left_to_that(model, cache, caplog):
    first = logits(model)
    (file,) = files(cache)
    file.unlink()
    with locked(file):
        assert torch.equal(logits(model), first)
        assert not file.exists()
    assert warnings(caplog) == []


def start(directory: str, barrier, answers) -> None:
    with Engine.load(directory, device="cpu", num_blocks=16, quantization="int8") as engine:
        pass
    barrier.wait(120)
    with Engine.load(directory, device="cpu", num_blocks=16, quantization="int4") as engine:
        engine.add([5, 6, 7], SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))
        found = []
        while engine.has_work:
            found += [output.token_id for output in engine.step()]
    answers.put(found)


@pytest.mark.slow
def test_processes_that_start_together(model, cache, monkeypatch):
    monkeypatch.setenv("FASTGEN_CPU_KERNELS", "0")  # or each would build the library into this test's cache
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=start, args=(str(model), barrier, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=180) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found[0] == found[1] == found[2]
    assert [file.suffix for file in files(cache)] == [".safetensors"] * 2
