"""The engine: requests in, one forward pass a step, tokens out."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from fastgen.config import EngineConfig
from fastgen.core.blueprint import Blueprint, draw
from fastgen.core.calibration import Calibration
from fastgen.core.loading import load_model, tell
from fastgen.core.lora import Loras
from fastgen.core.measuring import Tick, calibrate, calibrate_at_start
from fastgen.core.policy import Outcome, Scheduler, Sequence
from fastgen.core.processors import PluginProcessors
from fastgen.core.request import Limits, Sampling, resolve
from fastgen.core.runtime.choice import Choice, choice_of
from fastgen.core.runtime.graphs import RecordedPasses
from fastgen.core.runtime.kv_cache import KVCache
from fastgen.core.runtime.ragged import RaggedBatchBuilder
from fastgen.core.runtime.runner import PassResult, Runner
from fastgen.core.runtime.sampler import LogitsProcessor, Sampler, SequenceSampler, make_processors
from fastgen.core.stats import EngineStats
from fastgen.errors import EngineClosedError, FastgenError, InvalidRequestError
from fastgen.kernels import cpu
from fastgen.text import Tokenizer
from fastgen.types import SamplingParams, StepOutput

__all__ = ["Engine", "EngineStats"]

logger = logging.getLogger("fastgen")


class Engine:
    """Drives a model step by step; for callers that own the loop.

    ::

        engine = Engine.load("org/name")
        engine.add(engine.tokenizer.encode("Hello"), SamplingParams(max_new_tokens=8))
        while engine.has_work:
            for output in engine.step():
                print(output)

    Not thread-safe: call it from one thread (``Pipeline`` does so for many callers).
    """

    def __init__(
        self,
        blueprint: Blueprint,
        config: EngineConfig,
        model: Any,
        tokenizer: Tokenizer | None,
        loras: Loras | None = None,
    ) -> None:
        self.config, self.blueprint, self.tokenizer = config, blueprint, tokenizer
        self.max_model_len = blueprint.max_model_len
        self.max_batch_tokens = blueprint.budget.tokens
        cache = KVCache(model, blueprint.cache, blueprint.dtype, blueprint.device)
        rows = model.head.vocab_rows
        self.limits = Limits(
            max_model_len=self.max_model_len,
            vocab_rows=model.embed.vocab_rows,
            valid_ids=min(rows, tokenizer.num_ids) if tokenizer is not None else rows,
            cache_tokens=blueprint.cache.tokens,
            loras=tuple(plan.name for plan in blueprint.loras),
        )
        budget, running = blueprint.pass_limits(config)
        builder = RaggedBatchBuilder(
            max_tokens=budget,
            max_sequences=running,
            max_blocks=-(-self.limits.most_tokens // config.block_size),
            block_size=config.block_size,
            device=blueprint.device,
            caches=cache.layers,
        )
        # LoRA's rows are told to the layers beside the batch: such a pass cannot be recorded.
        record = config.record_passes and loras is None
        passes = RecordedPasses(model, blueprint.kernels) if record else model
        argmax = blueprint.kernels.choose("argmax", size=self.limits.valid_ids)
        self.runner = Runner(passes, builder, Sampler(valid_rows=self.limits.valid_ids, argmax=argmax), loras)
        self.scheduler = Scheduler(
            num_blocks=blueprint.cache.num_blocks,
            block_size=config.block_size,
            max_batch_tokens=budget,
            max_sequences=running,
            policy=config.policy,
            queue_order=config.queue_order,
            prefix_caching=config.prefix_caching,
            seed=config.seed or 0,
        )
        self._eos = blueprint.model_config.eos_token_ids | (tokenizer.eos_token_ids if tokenizer is not None else set())
        self._model = model
        self._seeds = random.Random(config.seed)
        self._ids = itertools.count()
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._passes = self._tokens = self._sampled = self._failed = self._peak = 0
        self._seconds = 0.0
        self._closed = False

    @classmethod
    def load(
        cls, model: str | Path, config: EngineConfig | None = None, *, progress: bool = False, **options: Any
    ) -> Self:
        """A model by Hugging Face name, directory or file, ready to run.

        Args:
            config: engine options; or give them as keywords.
            progress: show bars while files are fetched and read, and what was decided, on standard error.

        Raises:
            FastgenError: with what is wrong with the name, the files, the options or the plugin.
        """
        config = EngineConfig.of({**(config.model_dump(exclude_unset=True) if config else {}), **options})
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        blueprint = draw(model, config)
        if blueprint.device.type == "cpu":
            cpu.set_threads(torch.get_num_threads())
        for warning in blueprint.warnings:
            logger.warning("%s: %s", blueprint.files.name, warning)
        files = blueprint.files.directory
        # Without one, the engine works with token ids alone.
        tokenizer = (
            Tokenizer.load(files, trust_remote_code=config.trust_remote_code) if Tokenizer.is_in(files) else None
        )
        loras = Loras(blueprint.loras, blueprint.device) if blueprint.loras else None
        loaded = load_model(blueprint, loras, progress=progress)
        if blueprint.budget.pending:
            blueprint = calibrate_at_start(
                lambda b, c: cls(b, c, loaded, None, loras), blueprint, config, progress=progress
            )
        tell(blueprint, config, progress=progress)
        return cls(blueprint, config, loaded, tokenizer, loras)

    def calibrate(self, *, tick: Tick | None = None) -> Calibration:
        """Measure the throughput curve of the model, as `measuring.calibrate` does; only while nothing runs.

        Raises:
            FastgenError: requests are in flight.
            EngineClosedError: the engine was closed.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self.has_work:
            raise FastgenError(
                f"the engine has work ({len(self._requests)} requests in flight), which measuring would disturb and be "
                "disturbed by; calibrate before requests are added, or after the last has ended"
            )
        model, loras = self._model, self.runner.loras
        return calibrate(lambda b, c: type(self)(b, c, model, None, loras), self.blueprint, self.config, tick=tick)

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat: bool = False,
        text: bool = False,
    ) -> str:
        """Accept a request, or refuse it. It runs from the next step on.

        Args:
            params: unset fields take the model's defaults, then fastgen's.
            request_id: a name of your own, unique among the requests in flight.
            chat: whether an open answer length means all that fits.
            text: you turn tokens into text yourself, and apply the fields that speak of it (``stop``, ``include_stop``,
                ``skip_special_tokens``), as `Pipeline` does. The engine knows tokens only.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: says which field is wrong and why; nothing was accepted.
            EngineClosedError: the engine was closed.
        """
        sampling = self.check(prompt_token_ids, params, chat=chat)
        if sampling.stop and not text:
            raise InvalidRequestError(
                "stop: the engine knows tokens, not text, so it cannot look for stop strings; use a Pipeline, or "
                "stop_token_ids",
                field="stop",
            )
        request_id = f"r{next(self._ids)}" if request_id is None else request_id
        if request_id in self._requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use by a request in flight", field="request_id")
        if params is None or params.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        sequences = {
            index: self._sequence(request_id, index, sampling, prompt_token_ids) for index in range(sampling.n)
        }
        self._requests[request_id] = sequences
        for sequence in sequences.values():
            self.scheduler.add(sequence)
        return request_id

    def check(
        self, prompt_token_ids: list[int], params: SamplingParams | None = None, *, chat: bool = False
    ) -> Sampling:
        """What `add` would run, with every open question decided but an unset seed; raises as it does, and accepts
        nothing."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        sampling = resolve(
            params or SamplingParams(),
            prompt_token_ids,
            generation_config=self.blueprint.generation_config,
            eos_ids=self._eos,
            limits=self.limits,
            chat=chat,
            seeds=random.Random(0),  # `add` draws the one that counts, once nothing can be refused any more
        )
        self._make_processors(sampling, prompt_token_ids)  # refuses unknown names and options
        return sampling

    def _make_processors(self, sampling: Sampling, prompt: list[int]) -> list[tuple[str, LogitsProcessor]]:
        return make_processors(
            sampling.logits_processors,
            PluginProcessors(self.blueprint.registry, tokenizer=self.tokenizer, stop_token_ids=sampling.stop_ids),
            vocab_size=self.limits.valid_ids,
            prompt_token_ids=prompt,
        )

    def _sequence(self, request_id: str, index: int, sampling: Sampling, prompt: list[int]) -> Sequence:
        scored = index == 0 and sampling.prompt_logprobs >= 0
        choice = Choice(
            request_id=request_id,
            index=index,
            sampling=sampling,
            sampler=SequenceSampler(
                sampling, prompt, index, self._make_processors(sampling, prompt), vocab_size=self.limits.valid_ids
            ),
            prompt_scores=[None] * len(prompt) if scored else None,
        )
        renew_at = self._model.renewal(len(prompt))
        return Sequence(
            prompt,
            max_tokens=sampling.max_tokens,
            stop_ids=sampling.stop_ids,
            min_tokens=sampling.min_new_tokens,
            priority=sampling.priority,
            namespace=self._namespace(len(prompt), sampling),
            renew_at=renew_at,
            renewed_namespace=None if renew_at is None else self._namespace(renew_at, sampling),
            read_cache=not scored,
            payload=choice,
        )

    def _namespace(self, length: int, sampling: Sampling) -> Hashable:
        """What must be equal for cached keys to be shared. Within one engine, model and dtype are; what else changes
        the keys is the rope's regime and the LoRA adapter."""
        return self._model.regime(length), sampling.lora, sampling.cache_salt

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its choices) now. Its last output, with reason ``abort``, comes from the next step.
        Unknown and finished requests are ignored."""
        if self._closed:
            return
        for one, sequence in list(self._requests.get(request_id, {}).items()):
            if index is None or one == index:
                self.scheduler.abort(sequence)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do something: requests in flight, or outputs of aborted ones to deliver."""
        return not self._closed and self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """One forward pass over the running sequences and pieces of prompts that fill the token budget."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        started = time.perf_counter()
        plan = self.scheduler.plan()
        used = self.scheduler.pool.allocator.num_used
        try:
            result = self.runner.run(plan) if plan.sequences else PassResult()
        except (
            Exception,
            SystemExit,
        ) as error:  # out of memory, a plugin's fault: this pass's sequences end, the others go on
            result = PassResult(
                errors=dict.fromkeys(plan.sequences, f"the pass failed: {type(error).__name__}: {error}")
            )
            logger.exception("a forward pass of %d tokens failed", plan.num_tokens)
            return self._outputs(self.scheduler.fail(plan), result)
        outcomes = self.scheduler.commit(plan, result.tokens)
        if plan.sequences:
            self._passes += 1
            self._tokens += plan.num_tokens
            self._peak = max(self._peak, used)
            self._sampled += len(result.tokens) - result.tokens.count(None)
            self._seconds += time.perf_counter() - started
        return self._outputs(outcomes, result)

    def _outputs(self, outcomes: list[Outcome], result: PassResult) -> list[StepOutput]:
        logprobs, errors = result.logprobs, result.errors
        outputs = []
        for outcome in outcomes:
            sequence, token, reason = outcome.sequence, outcome.token, outcome.finish_reason
            choice = choice_of(sequence)
            scores = None
            if token is not None:
                choice.sampler.observe(token)
                if not choice.delivered:
                    choice.delivered = True
                    scores, choice.prompt_scores = choice.prompt_scores, None
            if reason is not None:
                self._failed += reason == "error"
                self._forget(choice)
            outputs.append(
                StepOutput(
                    choice.request_id,
                    choice.index,
                    token,
                    logprobs.get(sequence) if logprobs and token is not None else None,
                    reason,
                    sequence.stop,
                    errors.get(sequence) if errors else None,
                    sequence.num_cached,
                    scores,
                )
            )
        return outputs

    def _forget(self, choice: Choice) -> None:
        choices = self._requests.get(choice.request_id)
        if choices is not None:
            choices.pop(choice.index, None)
            if not choices:
                del self._requests[choice.request_id]

    # ---- state -----------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Where the engine stands.

        Raises:
            EngineClosedError: it was closed.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed")
        policy = self.scheduler.stats
        return EngineStats(
            passes=self._passes,
            tokens=self._tokens,
            sampled=self._sampled,
            failed=self._failed,
            seconds=self._seconds,
            running=policy.running,
            waiting=policy.waiting,
            preemptions=policy.preemptions,
            total_blocks=policy.num_blocks,
            used_blocks=policy.used_blocks,
            cached_blocks=policy.cached_blocks,
            peak_blocks=self._peak,
            prefix_hit_tokens=policy.prefix_hit_tokens,
            prefix_queried_tokens=policy.prefix_queried_tokens,
        )

    def close(self) -> None:
        """Drop the model and the cache. Requests in flight get no more outputs; closing twice is harmless."""
        self._closed = True
        self._requests.clear()
        self._model = self.runner = self.scheduler = None  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
