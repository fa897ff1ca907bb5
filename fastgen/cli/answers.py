"""How finished (or interrupted) answers are shown: as text for people, as lines of JSON for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from fastgen.cli.prompts import Job
from fastgen.types import Completion, Response, TokenLogprob

__all__ = ["json_line", "text_block"]

SHOWN_PROMPT = 70


def text_block(index: int, total: int, job: Job, response: Response) -> str:
    """The texts of a response, under a heading where it is not the only one."""
    lines = [f"--- {index + 1}/{total}: {_short(job)}"] if total > 1 else []
    for choice in response.choices:
        if len(response.choices) > 1:
            lines.append(f"[choice {choice.index + 1}]")
        lines.append(choice.text)
        if choice.finish_reason == "error":
            lines.append(f"(failed: {choice.error})")
        elif choice.finish_reason == "abort":
            lines.append("(interrupted)")
    return "\n".join(lines)


def json_line(index: int, job: Job, response: Response) -> str:
    """A response as one line of JSON; never NaN or an infinity, which JSON does not have."""
    usage = response.usage
    fields: dict[str, Any] = {
        "index": index,
        **job.given,
        "choices": [_choice(choice) for choice in response.choices],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }
    if response.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None if one is None else _logprob(one) for one in response.prompt_logprobs]
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _short(job: Job) -> str:
    if job.prompt_token_ids is not None:
        return f"{len(job.prompt_token_ids)} token ids"
    text = job.prompt if job.prompt is not None else str((job.messages or [{}])[-1].get("content"))
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_PROMPT else f"{text[: SHOWN_PROMPT - 3]}..."


def _choice(choice: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop": choice.stop,
    }
    if choice.logprobs is not None:
        fields["logprobs"] = [_logprob(one) for one in choice.logprobs]
    if choice.error is not None:
        fields["error"] = choice.error
    return fields


def _logprob(one: TokenLogprob) -> dict[str, Any]:
    """A token that was masked out has log-probability minus infinity: ``null``."""
    fields: dict[str, Any] = {
        "token_id": one.token_id,
        "token": one.token,
        "logprob": one.logprob if math.isfinite(one.logprob) else None,
        "rank": one.rank,
    }
    if one.top:
        fields["top"] = [_logprob(other) for other in one.top]
    return fields
