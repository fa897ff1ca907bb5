"""The public names exist, and what must start at once loads neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fastgen
import fastgen.api
from fastgen.api import _HOMES as API_HOMES

HEAVY = "[m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub') if m in sys.modules]"
COMMAND = (
    "from fastgen.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", fastgen.__all__)
def test_fastgen_exports(name: str) -> None:
    assert getattr(fastgen, name) is not None
    assert name in dir(fastgen)


@pytest.mark.parametrize("name", fastgen.api.__all__)
def test_api_exports(name: str) -> None:
    assert getattr(fastgen.api, name) is not None
    assert name in dir(fastgen.api)


def test_api_lists_every_lazy_name() -> None:
    assert set(API_HOMES) <= set(fastgen.api.__all__)


@pytest.mark.parametrize("module", [fastgen, fastgen.api], ids=["fastgen", "fastgen.api"])
def test_unknown_name_is_an_attribute_error(module: object) -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = module.Nonsense  # type: ignore[attr-defined]


def loaded_by(code: str) -> str:
    script = f"{code}\nimport sys\nprint({HEAVY}, file=sys.stderr)"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import fastgen",
        "import fastgen.api",
        "from fastgen import SamplingParams, EngineConfig",
        *(COMMAND.format(arguments=a) for a in (["--help"], ["--version"], ["models"], ["plugins", "--json"])),
        *(COMMAND.format(arguments=[a, "--help"]) for a in ("generate", "chat", "explain", "bench")),
    ],
)
def test_light(code: str) -> None:
    assert loaded_by(code) == "[]"


def test_heavy_would_be_seen() -> None:
    assert loaded_by("import numpy") == "['numpy']"
