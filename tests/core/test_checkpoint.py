"""Weight files: what is read, what is refused before anything is read, and how much memory it takes."""

from __future__ import annotations

import json
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.core import bin_weights, checkpoint
from fastgen.core.checkpoint import Checkpoint, check_memory
from fastgen.core.safetensors_header import DTYPES
from fastgen.errors import CheckpointError
from fastgen.testing.checkpoints import tiny_llama

INDEX = "model.safetensors.index.json"
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("whole"), tokenizer=False)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "sharded", tokenizer=False, shards=2)


def refused(directory: Path, match: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=match) as error:
        Checkpoint.open(directory, **options)
    assert "\n" not in str(error.value)


def rewrite_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((directory / INDEX).read_text())
    change(content["weight_map"])
    (directory / INDEX).write_text(json.dumps(content))


def kept(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in Checkpoint.open(directory, **options).stream()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# ---- what is read -------------------------------------------------------------------------------------------------


def test_equal_to_the_reference_reader(whole: Path) -> None:
    theirs = load_file(whole / "model.safetensors")
    opened = Checkpoint.open(whole)
    assert opened.warnings == []
    assert {name: info.shape for name, info in opened.tensors.items()} == {n: tuple(t.shape) for n, t in theirs.items()}
    assert opened.total_bytes == sum(tensor.nbytes for tensor in theirs.values())
    assert same(kept(whole), theirs)


def test_shards_hold_the_same_model(whole: Path, sharded: Path) -> None:
    assert same(kept(sharded), load_file(whole / "model.safetensors"))
    files = {info.file.name for info in Checkpoint.open(sharded).tensors.values()}
    assert files == {SHARD1, SHARD2}


def test_every_number_format(tmp_path: Path) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]])
    tensors = {code: values.to(getattr(torch, name)) for code, (name, _) in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = Checkpoint.open(tmp_path)
    assert {name: f"torch.{info.dtype}" for name, info in opened.tensors.items()} == {
        name: str(tensor.dtype) for name, tensor in tensors.items()
    }
    assert same(kept(tmp_path), tensors)


def test_some_names_only(whole: Path) -> None:
    opened = Checkpoint.open(whole)
    wanted = ["model.norm.weight", "lm_head.weight"]
    assert {name for name, _ in opened.stream(wanted)} == set(wanted)
    with pytest.raises(CheckpointError, match=r"model\.norm\.wait.*Did you mean 'model\.norm\.weight'"):
        opened.stream(["model.norm.wait"])


@pytest.mark.parametrize("limit", [1, 5000, 2**40])
def test_mapping_anew_changes_nothing(sharded: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept(sharded)
    monkeypatch.setattr(checkpoint, "_REMAP_BYTES", limit)
    assert same(kept(sharded), before)


def test_hub_cache_links_are_followed(whole: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0123").write_bytes((whole / "model.safetensors").read_bytes())
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert same(kept(snapshot), load_file(whole / "model.safetensors"))
    (blobs / "0123").unlink()
    refused(snapshot, "no weights")


def test_file_replaced_after_opening(whole: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4)}, file)
    opened = Checkpoint.open(tmp_path)
    save_file({"a": torch.zeros(5)}, file)
    with pytest.raises(CheckpointError, match="changed while"):
        list(opened.stream())


# ---- A2: missing, truncated, stale, stray -------------------------------------------------------------------------


def test_a2_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARD2).unlink()
    refused(sharded, re.escape(SHARD2))


@pytest.mark.parametrize("cut", [1, 64, 10_000])
def test_a2_a_truncated_shard_is_named(sharded: Path, cut: int) -> None:
    content = (sharded / SHARD2).read_bytes()
    (sharded / SHARD2).write_bytes(content[:-cut])
    refused(sharded, rf"{re.escape(SHARD2)} is cut off.*\({cut} missing\)")


def test_a2_bytes_too_many(sharded: Path) -> None:
    with (sharded / SHARD1).open("ab") as file:
        file.write(b"\0" * 64)
    refused(sharded, rf"{re.escape(SHARD1)} is damaged.* 64 more")


@pytest.mark.parametrize("stray", ["model.safetensors", "consolidated.safetensors", "model-00003-of-00003.safetensors"])
def test_a2_stray_files_are_ignored_with_a_warning(whole: Path, sharded: Path, stray: str) -> None:
    tensors = load_file(whole / "model.safetensors")
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, sharded / stray)
    assert same(kept(sharded), tensors)
    assert stray in "".join(Checkpoint.open(sharded).warnings)


def test_a2_stray_beside_a_single_file(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even a header")
    assert "consolidated.safetensors" in "".join(Checkpoint.open(tmp_path).warnings)
    assert same(kept(tmp_path), load_file(whole / "model.safetensors"))


def test_a2_index_names_a_tensor_its_file_lacks(sharded: Path) -> None:
    rewrite_index(sharded, lambda files: files.update({"model.extra.weight": SHARD1}))
    refused(sharded, r"model\.extra\.weight.*model-00001.*not there")


def test_a2_index_names_the_wrong_file(sharded: Path) -> None:
    rewrite_index(sharded, lambda files: files.update({"lm_head.weight": SHARD2}))
    rewrite_index(sharded, lambda files: files.update({"model.norm.weight": SHARD1}))
    refused(sharded, "not there")


def test_a2_index_omits_a_tensor(sharded: Path) -> None:
    rewrite_index(sharded, lambda files: files.pop("model.norm.weight"))
    opened = Checkpoint.open(sharded)
    assert "model.norm.weight" in opened.tensors
    assert "model.norm.weight" in "".join(opened.warnings)


def test_a2_tensor_in_two_shards(sharded: Path) -> None:
    tensors = load_file(sharded / SHARD2)
    name, tensor = next(iter(load_file(sharded / SHARD1).items()))
    save_file({**tensors, name: tensor}, sharded / SHARD2)
    refused(sharded, rf"{re.escape(name)}.*two files")


def test_a2_empty_directories(tmp_path: Path) -> None:
    refused(tmp_path, "empty")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no weights")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    refused(tmp_path, "model-00001-of-00002.safetensors cannot be taken")
    refused(tmp_path / "nowhere", "not a directory")


def test_a2_files_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, "holds no tensors")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"metadata": {}}', '{"weight_map": {"a": 3}}'],
)
def test_indexes_that_are_none(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    refused(sharded, re.escape(INDEX))


# ---- F5: hostile paths and headers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x.bin", "x\0.safetensors"],
)
def test_f5_index_paths_that_lead_elsewhere(sharded: Path, path: str) -> None:
    for place in (sharded.parent / "x.safetensors", sharded / "x.bin"):
        place.write_bytes((sharded / SHARD1).read_bytes())
    (sharded / "sub").mkdir()
    rewrite_index(sharded, lambda files: files.update(dict.fromkeys(files, path)))
    refused(sharded, "same directory|in that directory")


def tensor_entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_raw(directory: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": tensor_entry(shape=[-2])}, "shape"),
        ({"a": tensor_entry(shape=[2.0])}, "shape"),
        ({"a": tensor_entry(shape=[True, 2])}, "shape"),
        ({"a": tensor_entry(shape="2")}, "shape"),
        ({"a": tensor_entry(shape=[3])}, "takes 12 bytes, its data_offsets span 8"),
        ({"a": tensor_entry(shape=[2**32, 2**32])}, "data_offsets span 8"),
        ({"a": tensor_entry(shape=[2**62, 4, 0, 2])}, "data_offsets span 8"),
        ({"a": tensor_entry(shape=[2**64])}, "shape"),
        ({"a": tensor_entry(offsets=[-8, 0])}, "data_offsets"),
        ({"a": tensor_entry(offsets=[8, 0])}, "data_offsets"),
        ({"a": tensor_entry(offsets=[0, 4, 8])}, "data_offsets"),
        ({"a": tensor_entry(offsets=[0, 8.0])}, "data_offsets"),
        ({"a": tensor_entry(offsets=None)}, "data_offsets"),
        ({"a": tensor_entry(offsets=[4, 12])}, "leaves a hole after the header"),
        ({"a": tensor_entry(), "b": tensor_entry()}, "'b'.*overlaps 'a'"),
        ({"a": tensor_entry(), "b": tensor_entry(offsets=[4, 12])}, "'b'.*overlaps 'a'"),
        ({"a": tensor_entry(), "b": tensor_entry(offsets=[12, 20])}, "'b'.*hole after 'a'"),
        ({"a": tensor_entry(), "b": tensor_entry(offsets=[8, 16])}, "cut off.*8 missing"),
        ({"a": tensor_entry(dtype="F8_E4M3", shape=[8])}, "F8_E4M3.*not supported"),
        ({"a": tensor_entry(dtype="F31")}, "F31"),
        ({"a": tensor_entry(dtype=["F32"])}, "number format"),
        ({"a": [0, 8]}, "not an object"),
        ([], "not a JSON object"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "a": 3}', "'a' twice"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_f5_bad_headers(tmp_path: Path, header: Any, match: str) -> None:
    write_raw(tmp_path, header)
    refused(tmp_path, match)


def test_f5_the_raw_writer_writes_good_files_too(tmp_path: Path) -> None:
    """Negative control of the cases above."""
    write_raw(tmp_path, {"__metadata__": {"format": "pt"}, "a": tensor_entry()}, struct.pack("<ff", 1.5, -2))
    assert kept(tmp_path)["a"].tolist() == [1.5, -2]


@pytest.mark.parametrize(
    ("length", "match"), [(2**63, "claims a header"), (2**64 - 1, "claims a header"), (10**6, "inside its header")]
)
def test_f5_header_lengths(tmp_path: Path, length: int, match: str) -> None:
    write_raw(tmp_path, {"a": tensor_entry()}, length=length)
    refused(tmp_path, match)


def test_f5_a_header_of_200_mb_of_spaces(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(200_000_008)
    refused(tmp_path, "claims a header of 200000000 bytes")


@pytest.mark.parametrize("content", [b"", b"\x01\x02", b"\0" * 8, b"\0" * 7])
def test_files_too_short_for_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, r"model\.safetensors")


def test_memory_that_is_not_there() -> None:
    check_memory(1, "a byte")
    with pytest.raises(CheckpointError, match=r"the model needs 1000000\.0 GB"):
        check_memory(10**15, "the model")


# ---- F3: .bin ------------------------------------------------------------------------------------------------------


class Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.randn(3, 4), "b": torch.arange(5)}


def test_f3_bin_only_by_flag(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "load_bin")
    assert same(kept(tmp_path, load_bin=True), tensors)


def test_f3_sharded_bin(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save({"a": tensors["a"]}, tmp_path / "one.bin")
    torch.save({"b": tensors["b"]}, tmp_path / "two.bin")
    index = {"weight_map": {"a": "one.bin", "b": "two.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(tmp_path, "load_bin")
    assert same(kept(tmp_path, load_bin=True), tensors)


def test_f3_safetensors_go_first(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit(tmp_path / "ran")))
    assert same(kept(tmp_path, load_bin=True), tensors)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load_bin", [False, True])
@pytest.mark.parametrize("writer", ["torch", "torch legacy", "pickle"])
@pytest.mark.parametrize("place", ["pytorch_model.bin", "shard", "index", "safetensors", "safetensors index"])
def test_f3_a_pickle_never_runs(tmp_path: Path, place: str, writer: str, load_bin: bool) -> None:
    marker = tmp_path / "ran"
    content = {"a": torch.zeros(2), "b": Exploit(marker)}
    name = {
        "shard": "one.bin",
        "index": "pytorch_model.bin.index.json",
        "safetensors": "model.safetensors",
        "safetensors index": INDEX,
    }.get(place, place)
    if writer == "pickle":
        (tmp_path / name).write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=writer == "torch")
    if place == "shard":
        (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "one.bin", "b": "one.bin"}}')
    refused(tmp_path, ".", load_bin=load_bin)
    assert not marker.exists()


def test_f3_the_exploit_works_where_pickles_run(tmp_path: Path) -> None:
    """Negative control: the same file does run code in a loader that trusts it."""
    torch.save({"b": Exploit(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ([torch.zeros(2)], "list"),
        ({"a": 3}, "'a' is a int"),
        ({3: torch.zeros(2)}, "3 is a Tensor"),
        ({"state_dict": {"a": torch.zeros(2)}}, "state_dict"),
        ({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": torch.zeros(1).expand(2**40)}, "more bytes"),
        ({}, "no tensors"),
    ],
    ids=str,
)
def test_f3_bin_with_other_things(tmp_path: Path, content: Any, match: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    refused(tmp_path, match, load_bin=True)


def test_f3_truncated_bin(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 10):
        (tmp_path / "pytorch_model.bin").write_bytes(content[:size])
        refused(tmp_path, "pytorch_model.bin", load_bin=True)


def test_f3_old_torch_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(bin_weights.torch, "__version__", "2.9.1+cpu")
    refused(tmp_path, r"torch 2\.10 or newer, this is 2\.9\.1", load_bin=True)


# ---- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from fastgen.core.checkpoint import Checkpoint

def mebibytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":")) / 1024

opened = Checkpoint.open(sys.argv[1], load_bin=True)
model = {name: torch.zeros(info.shape) for name, info in opened.tensors.items()}
before, total = mebibytes("VmRSS"), opened.total_bytes / 2**20
for name, tensor in opened.stream():
    model[name].copy_(tensor)
print(before, mebibytes("VmHWM"), total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_peak_memory_is_one_copy(tmp_path: Path, file: str) -> None:
    """Loading 240 MB over memory already set aside adds one mapping (64 MiB and a tensor), not a second copy."""
    tensors = {f"t{i}": torch.full((1500, 1000), float(i)) for i in range(40)}
    save_file(tensors, tmp_path / file) if file.endswith("s") else torch.save(tensors, tmp_path / file)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    before, peak, total = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert total > 220
    assert peak - before < 64 + 6 + 20
