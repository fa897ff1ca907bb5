"""What a step costs besides the model: counted in calls, Python's and those into C, never in time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.core.collector import ResponseBuilder
from fastgen.core.engine import Engine
from fastgen.core.loop import EngineLoop, Submission
from fastgen.front.answers import WholeResponse
from fastgen.testing.checkpoints import tiny_llama
from fastgen.types import SamplingParams

pytestmark = pytest.mark.slow

FEW, MANY = 8, 40
WARM = 4
"""Steps until every sequence has its prompt read and its tokens' texts are known."""


def calls(function: Callable[[], object]) -> int:
    """Calls that ``function`` makes in this thread."""
    count = 0

    def event(frame: object, kind: str, argument: object) -> None:
        nonlocal count
        count += kind in ("call", "c_call")

    sys.setprofile(event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def cost(directory: Path, sequences: int, *, steps: int = 1, **sampling: Any) -> int:
    """Calls of the last of some steps in which every sequence gets a token, its delivery included. Of the model only
    its logits are left, always the same."""
    engine = Engine.load(directory, device="cpu", block_size=256, num_blocks=MANY, max_sequences=MANY)
    logits = torch.zeros(sequences, engine.limits.vocab_rows)
    logits[:, ord("a")] = 5.0
    engine.runner.model = lambda batch: logits[: len(batch.sampling)]
    loop = EngineLoop(engine)
    responses: list[Any] = []

    def step() -> None:
        loop._deliver(engine.step())

    def measure() -> int:
        params = SamplingParams(max_new_tokens=WARM + steps + 1, ignore_eos=True, **{"temperature": 0.0, **sampling})
        loop._accept([submission(f"r{number}", params, responses.append) for number in range(sequences)])
        for _ in range(WARM + steps - 1):
            step()
        last = calls(step)
        assert not responses
        step()
        return last

    try:
        found = loop.run(measure).result(60)  # in the loop's thread, to which all of this belongs
    finally:
        loop.close()
    assert [response.token_ids for response in responses] == [[ord("a")] * (WARM + steps + 1)] * sequences
    return found


def submission(request_id: str, params: SamplingParams, done: Callable[[Any], None]) -> Submission:
    prompt = list(b"once")
    return Submission(request_id, prompt, params, WholeResponse(ResponseBuilder(request_id, prompt), done))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Without tokenizers, so that every row of the vocabulary counts."""
    return [tiny_llama(tmp_path_factory.mktemp("wide"), tokenizer=False, vocab_size=size) for size in (300, 9000)]


def test_a_sequence_costs_a_few_calls(directory: Path) -> None:
    few, many = cost(directory, FEW), cost(directory, MANY)
    assert few < many, "the control: more sequences cost something"
    each = (many - few) / (MANY - FEW)
    assert each <= 26, "22 when this was written"
    assert few - FEW * each <= 200, "and the rest is one step's, whoever runs"


def test_the_cost_does_not_grow_with_the_answer(directory: Path) -> None:
    assert cost(directory, FEW, steps=80) == cost(directory, FEW, steps=3)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1e-3, "top_p": 0.9}, {"presence_penalty": 0.1}], ids=str)
def test_the_cost_does_not_grow_with_the_vocabulary(wide: list[Path], sampling: dict[str, Any]) -> None:
    small, large = (cost(directory, FEW, **sampling) for directory in wide)
    assert abs(large - small) <= 100, "some stages go about a wide row in other ways, none of them entry by entry"


def test_stop_strings_cost_little_where_none_begins(directory: Path) -> None:
    each = (cost(directory, FEW, stop=("</s>", "User:", "\n\n")) - cost(directory, FEW)) / FEW
    assert 0 < each <= 3
