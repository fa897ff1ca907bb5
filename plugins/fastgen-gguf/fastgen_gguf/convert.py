"""From a GGUF file to a Hugging Face directory, with gguf and transformers' own loader."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fastgen.api import CheckpointError, FastgenError, UnsupportedModelError, some
from fastgen_gguf.families import mend_weights
from fastgen_gguf.header import Header, read_header
from fastgen_gguf.repairs import complete_config, end_token_ids, split_digits, unused_tensors

__all__ = ["QuickReader", "convert"]

_LINK = "model.gguf"
_EXACT = (torch.bfloat16, torch.float16)


def convert(source: Path, target: Path, *, dtype: str | None = None) -> None:
    """Write the GGUF file ``source`` as a Hugging Face checkpoint into the empty directory ``target``.

    Args:
        dtype: number format of the weights. Unset: exact, each tensor in the narrowest of bfloat16, float16 and float32
            that holds all its values.

    Raises:
        CheckpointError: the file is damaged, or its tensors do not fit the model it describes.
        UnsupportedModelError: an architecture or feature that cannot be converted faithfully.
    """
    header = read_header(source)
    if "tokenizer.ggml.model" not in header.metadata:
        raise UnsupportedModelError(f"{source} holds no tokenizer, so text cannot be read with it")
    try:
        with _alone(source) as place, _parsed_once(), _quiet():
            config = AutoConfig.from_pretrained(**place, local_files_only=True, trust_remote_code=False)
            complete_config(config, header, source)
            tokenizer = AutoTokenizer.from_pretrained(**place, local_files_only=True, trust_remote_code=False)
            split_digits(tokenizer, header)
            tokenizer.save_pretrained(target)
            model = _load(place, config, header, source, dtype)
    except FastgenError:
        raise
    except (ValueError, NotImplementedError, KeyError) as error:
        text = f"{source} (architecture {header.architecture!r}): " + str(error).partition("\n")[0]
        if isinstance(error, NotImplementedError) or "supported" in text.lower():
            raise UnsupportedModelError(f"transformers' GGUF loader cannot read {text}") from error
        raise CheckpointError(f"cannot convert {text} ({type(error).__name__})") from error
    with _quiet():
        _save(model, target, header, narrow=dtype is None)


@contextmanager
def _alone(source: Path) -> Iterator[dict[str, str]]:
    """The file for transformers, in a folder of its own: files beside a GGUF are not part of it, and transformers
    would read them (config.json, which may name code to run, a chat template, an adapter)."""
    with tempfile.TemporaryDirectory(prefix="fastgen-gguf-") as folder:
        (Path(folder) / _LINK).symlink_to(source.absolute())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": _LINK}


def _load(place: dict[str, str], config: Any, header: Header, source: Path, dtype: str | None) -> PreTrainedModel:
    options: dict[str, Any] = {"config": config, "dtype": dtype or "float32", "output_loading_info": True}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:  # earlier releases always unpack
        pass
    model, info = AutoModelForCausalLM.from_pretrained(
        **place, **options, local_files_only=True, trust_remote_code=False
    )
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise CheckpointError(f"{source} does not fit the model it describes: it lacks {some(missing)}")
    unused = unused_tensors(model, header)
    if unused:
        raise UnsupportedModelError(
            f"{source} has tensors that transformers' model of {header.architecture!r} has no place for, and needs: "
            f"{some(unused)}"
        )
    mend_weights(model, header)
    return model


def _save(model: PreTrainedModel, target: Path, header: Header, *, narrow: bool) -> None:
    ends = end_token_ids(header)
    if ends and model.generation_config is not None:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.config._name_or_path = ""
    widest = max((tensor.dtype for tensor in model.parameters()), key=lambda kind: kind.itemsize)
    if narrow:
        kinds = [_narrow(parameter) for parameter in model.parameters()]
        widest = torch.float32 if len(set(kinds)) > 1 else kinds[0]
    model.save_pretrained(target)
    file = target / "config.json"
    content = json.loads(file.read_text()) | {"dtype": str(widest).removeprefix("torch.")}
    content.pop("_model_name_or_path", None)
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def _narrow(parameter: torch.nn.Parameter) -> torch.dtype:
    """Replace the values by the same ones in a narrower format, if one holds them all; one tensor at a time."""

    def holds(kind: torch.dtype, values: torch.Tensor) -> bool:
        return torch.equal(values.to(kind).to(values.dtype), values)

    values = parameter.data
    for kind in _EXACT:
        if holds(kind, values.flatten()[:4096]) and holds(kind, values):  # most tensors show it at once
            parameter.data = values.to(kind)
            break
    return parameter.dtype


class QuickReader(gguf.GGUFReader):  # type: ignore[misc]
    """gguf's reader over a plain array: slicing a memmap, once for every token of the vocabulary, is several times
    slower."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """transformers parses the file for the config, the tokenizer and the weights, and gguf's table of names for every
    module of the model: minutes for a large vocabulary. The answers are the same, so they are kept."""

    @functools.cache
    def parsed(path: str) -> gguf.GGUFReader:
        return QuickReader(path)

    def reader(path: str | os.PathLike[str], mode: str = "r") -> gguf.GGUFReader:
        return parsed(os.path.realpath(path)) if mode == "r" else QuickReader(path, mode)

    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.object(gguf, "GGUFReader", reader), mock.patch.object(gguf, "get_tensor_name_map", names):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars but on a terminal."""
    if sys.stderr.isatty():
        yield
        return
    from transformers import modeling_gguf_pytorch_utils as loader

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    has_bar = hasattr(loader, "tqdm")
    with mock.patch.object(loader, "tqdm", lambda items, **_: items) if has_bar else nullcontext():
        try:
            yield
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
