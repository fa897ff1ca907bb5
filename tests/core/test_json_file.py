"""Files that strangers wrote are read within bounds, by whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastgen.core import hf_config, json_file
from fastgen.core.json_file import parse_json_object, read_json_object
from fastgen.core.weight_files import SAFETENSORS_INDEX, read_index
from fastgen.errors import CheckpointError, ConfigError, FastgenError

BAD = {
    "": "not valid JSON",
    "{": "not valid JSON",
    "[" * 100_000: "nested too deeply",
    '{"a":' * 100_000: "nested too deeply",
    '{"a": ' + "1" * 5000 + "}": "not valid JSON",
    "[]": "must hold a JSON object, not list",
    "3": "must hold a JSON object, not int",
    "null": "must hold a JSON object, not NoneType",
}

READERS: list[tuple[str, Callable[[Path], Any], type[FastgenError]]] = [
    ("x.json", read_json_object, ConfigError),
    ("config.json", lambda path: hf_config.read_raw_config(path.parent), ConfigError),
    ("generation_config.json", lambda path: hf_config.read_generation_config(path.parent), ConfigError),
    (SAFETENSORS_INDEX, lambda path: read_index(path, ".safetensors"), CheckpointError),
]


@pytest.fixture(params=READERS, ids=lambda reader: reader[0])
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[bytes, str], None]:
    name, read, error = request.param

    def check(content: bytes, match: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=f"{name} .*{match}") as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is None

    return check


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:6])
def test_f5_hostile_files(refused: Callable[[bytes, str], None], text: str) -> None:
    refused(text.encode(), BAD[text])


def test_bytes_that_are_no_text(refused: Callable[[bytes, str], None]) -> None:
    refused(b'{"a": "\xff"}', "not valid JSON")


def test_f5_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path, max_bytes=8) == {"a": 1}
    with pytest.raises(ConfigError, match=r"config\.json is too large: more than 7 bytes"):
        read_json_object(path, max_bytes=7)


def test_f5_a_file_without_an_end(tmp_path: Path) -> None:
    """Its size says 0: what counts is what is read."""
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="too large"):
        read_json_object(tmp_path / "config.json", max_bytes=1000)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_config_files_are_bounded(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(json_file.MAX_BYTES + 1)
    read = {"config.json": hf_config.read_raw_config, "generation_config.json": hf_config.read_generation_config}[name]
    with pytest.raises(ConfigError, match="too large"):
        read(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*x\.json: No such file"):
        read_json_object(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match=r"cannot read .*: Is a directory"):
        read_json_object(tmp_path, error=CheckpointError)


def test_text_from_elsewhere() -> None:
    assert parse_json_object('{"a": "é"}', "line 3") == {"a": "é"}
    assert parse_json_object('{"a": "é"}'.encode(), "line 3") == {"a": "é"}
    with pytest.raises(CheckpointError, match=r"^line 3 is nested too deeply"):
        parse_json_object("[" * 100_000, "line 3", error=CheckpointError)


def test_what_is_good_is_read_as_the_standard_library_does(tmp_path: Path) -> None:
    text = json.dumps({"a": [1, 2.5, None, {"b": "ü"}], "c": True})
    (tmp_path / "x.json").write_text(text)
    assert read_json_object(tmp_path / "x.json") == json.loads(text)
