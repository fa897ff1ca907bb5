"""schemathesis: what the API says of itself is what it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastgen

pytestmark = pytest.mark.slow

CONFIG = """
[checks.positive_data_acceptance]
# Some of what the schema allows is refused for reasons that no schema can say (a prompt that is too long), or for now.
expected-statuses = [200, 400, 404, 429, 503]

[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 413, 415, 422]
"""


@pytest.mark.thorough
def test_schemathesis_finds_nothing(make: Any, serve: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    short = fastgen.pipeline(tiny, num_blocks=40, max_model_len=64, max_sequences=4)
    with short as pipe, serve(make(pipe, api_key="key", max_queue=12, max_sequences=4)) as live:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{live.url}/openapi.json"]
        options = ["--header", "Authorization: Bearer key", "--seed", "1", "--max-examples", "200"]
        options += ["--request-timeout", "60", "--no-color", "--generation-database", "none", "--workers", "1"]
        options += ["--max-time", "240"]
        result = subprocess.run(
            [*command, *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=550,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
        assert live.idle()
