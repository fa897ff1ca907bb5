"""Try every causal language model of transformers, at tiny size: ``python tests/survey.py``.

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
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "save_random", "survey", "try_model", "write"]

_PROMPTS = (37, 2, 11, 20)
_NEW = 10
_NOTES = {"granitemoehybrid": "with attention layers alone; with Mamba layers it is refused"}


@dataclass
class Row:
    """What became of one model type."""

    model_type: str
    architecture: str
    verdict: str
    """``matches``, ``refused``, ``differs``, or ``untried``."""
    reason: str = ""


def try_model(model_type: str, directory: Path, **overrides: Any) -> Row:
    """Build, save, load, compare.

    A random model may be so near a tie that rounding alone decides its tokens: then another one is drawn.
    """
    from fastgen_transformers.config import resolve
    from tiny_configs import tiny_config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from fastgen import FastgenError

    row = Row(model_type, NAMES[model_type], "untried")
    for seed in range(4):
        try:
            config = tiny_config(model_type, **overrides)
            resolve({**config.to_dict(), "architectures": [row.architecture]})
            save_random(config, directory, seed=seed)
        except FastgenError as error:
            row.verdict, row.reason = "refused", _short(error)
            return row
        except Exception as error:
            row.reason = f"no tiny checkpoint: {_short(error)}"
            return _refused_by_default(row)
        compare(row, directory)
        if row.verdict != "differs" or row.reason.startswith("fails") or _steady(directory):
            return row
    row.verdict, row.reason = "untried", "rounding alone changes transformers' own answers"
    return row


def _refused_by_default(row: Row) -> Row:
    """Whether its default config is refused, which takes no weights to find out."""
    import torch
    from fastgen_transformers import fastgen_models
    from tiny_configs import config_class

    from fastgen.api import UnsupportedModelError

    try:
        raw = {**config_class(row.model_type)().to_dict(), "architectures": [row.architecture]}
        parts = fastgen_models()[0].load()
        with torch.device("meta"):
            parts.build(parts.config.from_raw(raw))
    except UnsupportedModelError as error:
        row.verdict, row.reason = "refused", _short(error)
    except Exception as error:
        row.reason += f"; by default: {_short(error)}"
    return row


def _steady(directory: Path) -> bool:
    """Whether transformers gives the same tokens in float64, or cannot say."""
    prompts = _prompts(json.loads((directory / "config.json").read_text()))
    exact = _generate(directory, prompts, use_cache=False, dtype="float64")
    return isinstance(exact, str) or exact == _generate(directory, prompts, use_cache=False)


def compare(row: Row, directory: Path) -> None:
    """fastgen's tokens beside transformers'; fills ``row``."""
    from fastgen import FastgenError

    raw = json.loads((directory / "config.json").read_text())
    prompts = _prompts(raw)
    try:
        ours = _serve(directory, {raw["architectures"][0]: "transformers"}, prompts)
    except FastgenError as error:
        row.verdict, row.reason = "refused", _short(error)
        return
    except Exception as error:
        row.verdict, row.reason = "differs", f"fails: {_short(error)}"
        return
    row.verdict, row.reason = "matches", _NOTES.get(row.model_type, "")
    with_cache = _generate(directory, prompts, use_cache=True)
    if not isinstance(with_cache, str) and _difference(ours, with_cache, prompts) is None:
        return
    without = _generate(directory, prompts, use_cache=False)
    if isinstance(without, str):
        row.verdict, row.reason = "untried", f"generate fails: {without}"
    elif difference := _difference(ours, without, prompts):
        row.verdict, row.reason = "differs", difference
    else:
        failing = f"fails ({with_cache})" if isinstance(with_cache, str) else "answers otherwise"
        row.reason = f"with use_cache=False; with its cache, transformers itself {failing}"


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
    if type(model.config) is not type(config):  # the language part of a larger config: keep the whole, as published
        whole = {**config.to_dict(), "architectures": [type(model).__name__]}
        (directory / "config.json").write_text(json.dumps(whole, default=str))


def _prompts(raw: dict[str, Any]) -> list[list[int]]:
    import random

    choose = random.Random(0)
    vocab = raw.get("vocab_size") or raw.get("text_config", {}).get("vocab_size") or 128
    return [[choose.randrange(3, min(vocab, 128)) for _ in range(length)] for length in _PROMPTS]


def _serve(directory: Path, adapter: dict[str, str], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    from fastgen import Engine, SamplingParams

    params = SamplingParams(max_new_tokens=_NEW, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "device": "cpu",
        "num_blocks": 96,
        "block_size": 4,
        "max_batch_tokens": 16,
        "adapter": adapter,
    }
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


def _generate(
    directory: Path, prompts: list[list[int]], *, use_cache: bool, dtype: str = "float32"
) -> list[list[int]] | str:
    """transformers' answers, or why there are none."""
    import torch
    from transformers import AutoModelForCausalLM

    answers = []
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
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
    from fastgen_transformers import verified

    verified.table.cache_clear()
    verified.PATH = None  # look again, whatever was found before
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        send.send(try_model(model_type, Path(directory)))


def write(rows: list[Row], directory: Path) -> None:
    """The table for people (TABLE.md) and for the plugin (verified.json), in this distribution's ``directory``."""
    import transformers

    models = subprocess.run([sys.executable, "-m", "fastgen", "models", "--json"], stdout=subprocess.PIPE, check=True)
    served = {row["architecture"]: row["plugin"] for row in json.loads(models.stdout) if not row["fallback"]}
    found = [{**asdict(row), "plugin": served.get(row.architecture, "")} for row in rows]
    facts = {"transformers": transformers.__version__, "rows": found}
    (directory / "fastgen_transformers" / "verified.json").write_text(json.dumps(facts, indent=1) + "\n")
    (directory / "TABLE.md").write_text(_table(found, transformers.__version__))


def _table(rows: list[dict[str, str]], version: str) -> str:
    matching = [row for row in rows if row["verdict"] == "matches"]
    beyond = {row["architecture"] for row in matching if not row["plugin"] and not row["reason"]}
    lines = [
        f"# Every causal language model of transformers {version}",
        "",
        "Written by `python tests/survey.py --write`: it builds a random model of each at tiny size,",
        "serves it with this plugin, in chunks, batched and from the prefix cache, and compares the tokens with",
        "transformers' `generate`. No row may differ in silence: one that does is refused from then on.",
        "",
        f"Of {len(rows)} model types, {len(matching)} match; {len(beyond)} architectures of these have no plugin of "
        "their own. Where one has (third column), the fallback was pinned.",
        "",
        "| model type | architecture | plugin | verdict |",
        "|---|---|---|---|",
    ]
    order = {"matches": 0, "differs": 1, "refused": 2, "untried": 3}
    for row in sorted(rows, key=lambda row: (order[row["verdict"]], row["model_type"])):
        reason = row["reason"].removeprefix(f"{row['architecture']} cannot run over fastgen's paged cache: ")
        told = f"{row['verdict']}: {reason}" if reason else row["verdict"]
        cells = (row["model_type"], row["architecture"], row["plugin"], told.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/survey.py", description=__doc__)
    parser.add_argument("model_type", nargs="*", help="all, unless given")
    parser.add_argument("-j", "--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write TABLE.md and fastgen_transformers/verified.json")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="take rows from what an earlier run printed")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = [Row(**json.loads(line)) for line in args.rows.read_text().splitlines()] if args.rows else []
    if not args.rows or args.model_type:
        rows = _run(args.model_type, args.processes, rows)
    if args.write:
        write(rows, Path(__file__).parents[1])


def _run(model_types: list[str], processes: int, known: list[Row]) -> list[Row]:
    import fastgen_transformers.hosted  # noqa: F401  what every child needs, loaded once
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    torch.set_num_threads(1)
    rows = {row.model_type: row for row in known}
    for row in survey(model_types or list(NAMES), processes=processes):
        print(json.dumps(asdict(row)), flush=True)
        rows[row.model_type] = row
    return list(rows.values())


if __name__ == "__main__":
    main()
