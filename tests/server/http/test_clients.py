"""Other people's clients, unchanged: litellm, LangChain, lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # importing them takes long

USER = [{"role": "user", "content": "Tell me"}]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched, no usage is reported."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def test_litellm(live: Any) -> None:
    import litellm

    where = {"api_base": f"{live.url}/v1", "api_key": "none", "num_retries": 0}
    wanted = live.pipe.chat(USER, max_new_tokens=6)
    got = litellm.completion(model="openai/tiny", messages=USER, max_tokens=6, **where)
    assert got.choices[0].message.content == wanted.text
    assert got.usage.completion_tokens == 6
    stream = litellm.completion(model="openai/tiny", messages=USER, max_tokens=6, stream=True, **where)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == wanted.text
    text = litellm.text_completion(model="text-completion-openai/tiny", prompt="Hello", max_tokens=6, **where)
    assert text.choices[0].text == live.pipe("Hello", max_new_tokens=6).text
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(model="openai/other", messages=USER, **where)
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(model="openai/tiny", messages=USER, max_tokens=600, **where)


def test_langchain(live: Any) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    where: dict[str, Any] = {"base_url": f"{live.url}/v1", "api_key": "none", "model": "tiny", "max_retries": 0}
    chat = ChatOpenAI(**where, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    wanted = live.pipe.chat(USER, max_new_tokens=6, logprobs=2)
    got = chat.invoke("Tell me")
    assert got.content == wanted.text
    assert got.usage_metadata["output_tokens"] == 6
    assert [one["logprob"] for one in got.response_metadata["logprobs"]["content"]] == pytest.approx(
        [one.logprob for one in wanted.logprobs], abs=1e-4
    )
    assert "".join(str(one.content) for one in chat.stream("Tell me")) == wanted.text
    complete = OpenAI(**where, max_tokens=6, temperature=0)
    assert complete.invoke("Hello") == live.pipe("Hello", max_new_tokens=6).text
    assert "".join(complete.stream("Hello")) == live.pipe("Hello", max_new_tokens=6).text


QUESTIONS = [
    {"question": "Two and two is", "choices": ["four", "a cat", "blue"], "answer": 0},
    {"question": "The sky is", "choices": ["sour", "blue", "seven"], "answer": 1},
    {"question": "Water is", "choices": ["loud", "wet", "Tuesday"], "answer": 1},
    {"question": "Grüße aus", "choices": ["Köln", "x", "dem Meer"], "answer": 2},
]


@pytest.fixture
def questions(tmp_path: Path) -> dict[str, Any]:
    """A task of lm-eval's, of a file here."""
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    return {
        "task": "local_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_scores_as_with_transformers(live: Any, tiny: Path, questions: dict[str, Any], tokenized: bool) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    served = LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions",
        model="tiny",
        tokenizer=str(tiny),
        tokenizer_backend="huggingface",
        tokenized_requests=tokenized,
        batch_size=3,
        max_length=512,
        max_retries=1,
    )
    local = HFLM(pretrained=str(tiny), device="cpu", dtype="float32", batch_size=3, max_length=512)
    results = []
    for model in (served, local):
        made = lm_eval.simple_evaluate(
            model, tasks=[questions], bootstrap_iters=0, log_samples=True, random_seed=0, verbosity="ERROR"
        )
        assert made is not None
        samples = made["samples"]["local_questions"]
        scores = [one for sample in samples for one in sample["filtered_resps"]]
        results.append((made["results"]["local_questions"], scores))
    (one, own), (other, theirs) = results
    assert one["acc,none"] == other["acc,none"]
    assert one["acc_norm,none"] == other["acc_norm,none"]
    assert len(own) == len(theirs) == sum(len(question["choices"]) for question in QUESTIONS)
    assert [greedy for _, greedy in own] == [greedy for _, greedy in theirs]
    assert [float(score) for score, _ in own] == pytest.approx([float(score) for score, _ in theirs], abs=1e-3)
