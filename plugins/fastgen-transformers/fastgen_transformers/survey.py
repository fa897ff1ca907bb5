"""Try every causal language model of the installed transformers, at tiny size: ``python -m fastgen_transformers.survey``.

A random checkpoint of each is loaded by fastgen's engine with this plugin pinned, and answers ragged prompts in small
chunks, then once more from the prefix cache; the tokens must be those of transformers' ``generate``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import resource
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "try_model"]

_PROMPTS = (37, 2, 11, 20)
_NEW = 10


@dataclass
class Row:
    """What became of one model type."""

    model_type: str
    architecture: str
    verdict: str
    """``matches``, ``refused``, ``differs``, or ``untried``."""
    reason: str = ""


def try_model(model_type: str, directory: Path, **overrides: Any) -> Row:
    """Build, save, load, compare."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from fastgen.errors import FastgenError
    from fastgen_transformers.config import resolve
    from fastgen_transformers.tiny import tiny_config

    architecture = NAMES[model_type]
    try:
        config = tiny_config(model_type, **overrides)
        resolve({**config.to_dict(), "architectures": [architecture]})
        save_random(config, directory, seed=0)
    except FastgenError as error:
        return Row(model_type, architecture, "refused", _short(error))
    except Exception as error:
        return Row(model_type, architecture, "untried", f"no tiny checkpoint: {_short(error)}")
    return compare(model_type, architecture, directory)


def compare(model_type: str, architecture: str, directory: Path) -> Row:
    """fastgen's tokens beside transformers'."""
    from fastgen.errors import FastgenError

    written = json.loads((directory / "config.json").read_text())["architectures"][0]
    try:
        prompts = _prompts(json.loads((directory / "config.json").read_text()))
        ours = _serve(directory, {written: "transformers"}, prompts)
    except FastgenError as error:
        return Row(model_type, architecture, "refused", _short(error))
    except Exception as error:
        return Row(model_type, architecture, "differs", f"fails: {_short(error)}")
    row = Row(model_type, architecture, "matches")
    with_cache, without = _generate(directory, prompts, use_cache=True), None
    if isinstance(with_cache, str) or (difference := _difference(ours, with_cache, prompts)):
        without = _generate(directory, prompts, use_cache=False)
        if isinstance(without, str):
            return Row(model_type, architecture, "untried", f"generate fails: {without}")
        if difference := _difference(ours, without, prompts):
            return Row(model_type, architecture, "differs", difference)
        failing = f"fails ({with_cache})" if isinstance(with_cache, str) else "answers otherwise"
        row.reason = f"generate with use_cache=False; with its cache, transformers itself {failing}"
    return row


def _difference(ours: dict[str, list[list[int]]], theirs: list[list[int]], prompts: list[list[int]]) -> str | None:
    for times, answers in ours.items():
        for prompt, one, other in zip(prompts, answers, theirs, strict=True):
            if one != other:
                first = next((n for n, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0)
                return f"{times}: token {first + 1} of the answer to a prompt of {len(prompt)}"
    return None


def save_random(config: Any, directory: Path, *, seed: int) -> None:
    """A checkpoint in which every tensor counts, buffers too."""
    import torch
    from transformers import AutoModelForCausalLM

    from fastgen.testing.checkpoints import randomise

    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 20e6:
        raise ValueError(f"{size / 1e6:.0f} million parameters are not tiny")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed=seed)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.ndim == 1:
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    model.save_pretrained(directory)


def _prompts(raw: dict[str, Any]) -> list[list[int]]:
    import random

    choose = random.Random(0)
    vocab = raw.get("vocab_size") or raw.get("text_config", {}).get("vocab_size") or 128
    return [[choose.randrange(3, min(vocab, 128)) for _ in range(length)] for length in _PROMPTS]


def _serve(directory: Path, adapter: dict[str, str], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    from fastgen.core.engine import Engine
    from fastgen.types import SamplingParams

    params = SamplingParams(max_new_tokens=_NEW, temperature=0, ignore_eos=True)
    options = {"device": "cpu", "num_blocks": 96, "block_size": 4, "max_batch_tokens": 16, "adapter": adapter}
    with Engine.load(directory, **options) as engine:
        answers = {}
        for times in ("chunked and batched", "from the prefix cache"):
            ids = [engine.add(prompt, params) for prompt in prompts]
            tokens: dict[str, list[int]] = {one: [] for one in ids}
            while engine.has_work:
                for output in engine.step():
                    if output.error:
                        raise RuntimeError(output.error)
                    if output.token_id is not None:
                        tokens[output.request_id].append(output.token_id)
            answers[times] = [tokens[one] for one in ids]
        if not engine.stats().prefix_hit_tokens:
            raise RuntimeError("no prompt was found in the prefix cache")
    return answers


def _generate(directory: Path, prompts: list[list[int]], *, use_cache: bool) -> list[list[int]] | str:
    """transformers' answers, or why there are none."""
    import torch
    from transformers import AutoModelForCausalLM

    answers = []
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=_NEW,
                do_sample=False,
                eos_token_id=None,
                use_cache=use_cache,
            )
            answers.append(whole[0, len(prompt) :].tolist())
    except Exception as error:
        return _short(error)
    return answers


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if type(error).__module__.startswith("fastgen") else f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else text[:297] + "..."


def survey(model_types: list[str], *, processes: int = 1, seconds: float = 120) -> Iterator[Row]:
    """A row for each, in order. Each runs in a process of its own, forked from this one, so that one that crashes, or
    wants too much time or memory, is only one row."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    fork = multiprocessing.get_context("fork")
    running: list[tuple[str, Any, Any]] = []
    waiting = list(model_types)
    while running or waiting:
        while waiting and len(running) < processes:
            model_type = waiting.pop(0)
            receive, send = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(model_type, send))
            process.start()
            send.close()
            running.append((model_type, process, receive))
        model_type, process, receive = running.pop(0)
        row = Row(model_type, NAMES[model_type], "untried", f"no answer in {seconds:g} s")
        with contextlib.suppress(EOFError):
            if receive.poll(seconds):
                row = receive.recv()
        process.kill()
        process.join()
        yield row


def _child(model_type: str, send: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        send.send(try_model(model_type, Path(directory)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastgen_transformers.survey", description=__doc__)
    parser.add_argument("model_type", nargs="*")
    parser.add_argument("-j", "--processes", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    import fastgen.core.engine
    import fastgen_transformers.hosted  # what all children need

    torch.set_num_threads(1)
    for row in survey(args.model_type or list(NAMES), processes=args.processes):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
