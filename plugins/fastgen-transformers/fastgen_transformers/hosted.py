"""A transformers model as fastgen's engine sees one: parts to fill, attention to number, logits of rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from fastgen import api as fg
from fastgen_transformers.check import check_logits
from fastgen_transformers.config import TransformersConfig, resolve
from fastgen_transformers.probe import PROBE, AttentionCall, probe
from fastgen_transformers.refusals import refuse
from fastgen_transformers.routing import NAME, Pass, running
from fastgen_transformers.verified import remark
from fastgen_transformers.weights import Matching

__all__ = ["HostedDecoder", "build"]


def build(config: TransformersConfig) -> HostedDecoder:
    """See `fastgen.api.ModelSpec`.

    Raises:
        UnsupportedModelError: the model does what fastgen's paged attention does not; says what.
    """
    hosted, cls = resolve(config.raw)
    refuse(hosted, cls)
    try:
        observed = _make(config, PROBE, torch.float32, torch.device("meta"))
    except Exception as error:
        raise fg.UnsupportedModelError(
            f"{cls.__name__} cannot run over fastgen's paged cache: transformers does not build it, with "
            f"another attention function at least ({type(error).__name__}: {error})"
        ) from error
    refuse(observed.config, cls, observed)
    calls = probe(observed, longest=config.max_position_embeddings)
    where = fg.parameter(0)  # of the dtype and on the device that parts are built with
    return HostedDecoder(_make(config, NAME, where.dtype, where.device), calls)


def _make(config: TransformersConfig, attention: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers model, its parameters unfilled and its other buffers computed."""
    hosted, cls = resolve(config.raw)
    hosted.tie_word_embeddings = config.tie_word_embeddings
    hosted.use_cache = False
    if hasattr(hosted, "output_router_logits"):
        hosted.output_router_logits = False
    with device, no_init_weights():
        model = cls._from_config(hosted, dtype=dtype, attn_implementation=attention)
        model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if wanted := _kept_dtype(model, name, dtype):
            parameter.data = parameter.data.to(wanted)
    return model.eval()


def _kept_dtype(model: Any, name: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that transformers keeps this parameter in, where it is not the model's."""
    return next((kept for part, kept in model._get_dtype_plan(dtype).items() if part in name), None)


class HostedModule(fg.Layer):
    """The transformers model itself, and how a checkpoint fills it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._names = Matching(model)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def load(self, slot: str, tail: str, tensor: torch.Tensor) -> None:
        """Take in the checkpoint tensor called ``tail``, one of the ``slot`` that make a parameter together: these wait
        for the last of them."""
        target, _ = self._names.target(tail)
        waiting = self._waiting.setdefault(target, {})
        complete = len(waiting) + 1 == int(slot)
        waiting[tail] = tensor if complete else tensor.clone()
        if not complete:
            return
        del self._waiting[target]
        for name, value in self._names.convert(target, waiting).items():
            self.model.get_parameter_or_buffer(name).data.copy_(value)

    @torch.no_grad()
    def finish(self) -> None:
        """Compute what no checkpoint holds, as transformers does after it has loaded one."""
        for tensor in self.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        self.model.initialize_weights()


class _Rows(nn.Module):
    """How many rows a table has: all that the engine asks of an embedding and of a head."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.vocab_rows = rows


class HostedDecoder(fg.Decoder):
    """Runs the model's own forward pass, with every attention of it over the paged cache.

    Args:
        model: built with the attention implementation `routing.NAME`.
        calls: of its attention, in order.
    """

    def __init__(self, model: Any, calls: list[AttentionCall]) -> None:
        table = model.get_input_embeddings()
        head = model.get_output_embeddings()
        rows = model.config.get_text_config().vocab_size if head is None else head.weight.shape[0]
        super().__init__(_Rows(table.weight.shape[0]), [], nn.Identity(), _Rows(rows))
        self.hosted = HostedModule(model)
        self.cached = nn.ModuleList(
            fg.CachedAttention(
                call.heads,
                call.kv_heads,
                call.head_dim,
                value_dim=call.value_dim,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
            )
            for call in calls
        )
        self._attentions = tuple(self.attentions())
        for index, attention in enumerate(self._attentions):
            attention.index = index
        self.remarks = (remark(type(model).__name__),)
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, fg.Destination]:
        """Where each of a checkpoint's tensors goes.

        Raises:
            CheckpointError: one that nothing takes, a parameter that nothing fills, shapes that do not fit.
        """
        counts = Matching(self.hosted.model).check(shapes)
        return {name: fg.Destination("hosted", str(count), name) for name, count in counts.items()}

    def loaded(self) -> None:
        """See that the model gives the logits that it gives in transformers."""
        self.hosted.finish()
        check_logits(self, self.hosted.model)

    def forward(self, batch: fg.Batch) -> torch.Tensor:
        """Logits of the rows asked for, ``[len(batch.rows), vocab]``."""
        rows = {"logits_to_keep": batch.rows} if self._selects else {}
        with running(Pass(self._attentions, batch)):
            output = self.hosted.model(
                input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False, return_dict=True, **rows
            )
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects else logits.index_select(0, batch.rows)
