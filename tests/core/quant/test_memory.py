"""Weights are packed as they come: no more than a few of them are ever there as floats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from fastgen.testing.checkpoints import tiny_checkpoint

pytestmark = pytest.mark.slow

PEAK = """
import json, re, sys
from fastgen.testing.driver import draw_model
from fastgen.core.loading import load_model

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

blueprint = draw_model(sys.argv[1], **json.loads(sys.argv[2]))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = status("VmRSS")
model = load_model(blueprint)
print(status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """101 MB in float32, in files of a layer or two: of a file that is read, all is in memory at once."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return tiny_checkpoint(tmp_path_factory.mktemp("wide") / "model", config, shards=24, tokenizer=False)


def peak(directory: Path, cache: Path, **options) -> int:
    """Bytes that loading took at its height, in a process of its own."""
    command = [sys.executable, "-c", PEAK, str(directory), json.dumps(options)]
    environment = {**os.environ, "FASTGEN_CACHE": str(cache), "OMP_NUM_THREADS": "1", "FASTGEN_CPU_KERNELS": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_peak_of_loading(directory, tmp_path):
    floats = peak(directory, tmp_path)
    packing = peak(directory, tmp_path, quantization="int8", packed_cache=False)
    peak(directory, tmp_path, quantization="int8")
    mapped = peak(directory, tmp_path, quantization="int8")
    assert floats > 95e6
    assert packing < 0.6 * floats
    assert mapped < 0.15 * floats
