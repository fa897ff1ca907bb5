"""The last check, with the weights that will serve: the same logits as transformers gives, in pieces and in company."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from fastgen import api as fg
from fastgen_transformers.verified import DIFFERENT

__all__ = ["check_logits"]

_BLOCK = 16
# Two sequences, and in each pass how many tokens of each: first pieces, later ones across a block's end, last tokens.
_LENGTHS = (21, 5)
_PASSES = ((9, 2), (11, 2), (1, 1))
_BLOCKS = ((3, 1), (2,))
_FLOOR = {torch.float32: 3e-4}
_COARSE = 0.05  # half precision rounds away some per cent
_NUDGE = 16  # times the dtype's rounding: how much the embeddings are nudged to see what rounding does to this model
_MARGIN = 16  # times what the nudge changed is still called rounding
_MOST = 0.3  # but never this much: a model that mixes something up is off by tens of per cent


@dataclass
class _Batch:
    """A pass written by hand (`fastgen.api.Batch`)."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    sequence_of: torch.Tensor
    lengths: torch.Tensor
    layout: fg.PagedLayout
    caches: list[Any]
    memo: dict[Hashable, Any] = field(default_factory=dict)


@torch.inference_mode()
def check_logits(decoder: fg.Decoder, model: Any) -> None:
    """Run two short prompts through ``decoder`` (in ragged passes over a cache of its own) and, one by one, through
    transformers' plain forward pass of ``model``.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding, or a pass fails.
    """
    weight, name = model.get_input_embeddings().weight, type(model).__name__
    prompts = [_prompt(weight.shape[0], length).to(weight.device) for length in _LENGTHS]
    try:
        expected = [_plain(model, prompt) for prompt in prompts]
        got = _in_passes(decoder, prompts, weight.dtype)
        nudged = [_plain(model, prompt, nudge=_NUDGE * torch.finfo(weight.dtype).eps) for prompt in prompts]
    except Exception as error:
        raise fg.UnsupportedModelError(
            f"{name} cannot run over fastgen's paged cache: a trial of two short prompts failed "
            f"({type(error).__name__}: {error})"
        ) from error
    for ours, theirs, rounded in zip(got, expected, nudged, strict=True):
        allowed = max(_FLOOR.get(weight.dtype, _COARSE), min(_MARGIN * _off(rounded, theirs), _MOST))
        if not _off(ours, theirs) <= allowed:  # NaN, too
            raise fg.UnsupportedModelError(
                f"{name} cannot run over fastgen's paged cache: {DIFFERENT} (off by {_off(ours, theirs):.2g} of their "
                f"spread; rounding explains {allowed:.2g})"
            )


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


def _prompt(vocab: int, length: int) -> torch.Tensor:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(length))


def _plain(model: Any, prompt: torch.Tensor, *, nudge: float = 0.0) -> torch.Tensor:
    """transformers' own logits ``[tokens, vocab]``, float32, without a cache and with its own attention.

    Args:
        nudge: a relative change of the embeddings, each number up or down.
    """
    generator = torch.Generator().manual_seed(0)

    def shake(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + nudge * signs)

    before = model.config._attn_implementation
    handle = model.get_input_embeddings().register_forward_hook(shake) if nudge else None
    model.config._attn_implementation = "eager"
    try:
        logits: torch.Tensor = model(
            input_ids=prompt[None], attention_mask=torch.ones_like(prompt[None]), use_cache=False, return_dict=True
        ).logits
    finally:
        model.config._attn_implementation = before
        if handle is not None:
            handle.remove()
    return logits[0].float()


def _in_passes(decoder: fg.Decoder, prompts: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    device = prompts[0].device
    caches = [a.kernel.allocate(a.cache_spec, 4, _BLOCK, dtype, device) for a in decoder.attentions()]
    table = torch.zeros(len(prompts), 2, dtype=torch.int64, device=device)
    for row, blocks in enumerate(_BLOCKS):
        table[row, : len(blocks)] = torch.tensor(blocks)
    done = [0] * len(prompts)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for counts in _PASSES:
        positions = [torch.arange(d, d + n, device=device) for d, n in zip(done, counts, strict=True)]
        sequence_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
        places = torch.cat(positions)
        batch = _Batch(
            ids=torch.cat([prompt[p] for prompt, p in zip(prompts, positions, strict=True)]),
            positions=places,
            rows=torch.arange(sum(counts), device=device).flip(0),
            sequence_of=sequence_of,
            lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
            layout=fg.PagedLayout(
                block_size=_BLOCK,
                starts=[sum(counts[:n]) for n in range(len(counts))],
                counts=list(counts),
                contexts=[d + n for d, n in zip(done, counts, strict=True)],
                block_table=table,
                slots=table[sequence_of, places // _BLOCK] * _BLOCK + places % _BLOCK,
            ),
            caches=caches,
        )
        logits = decoder(batch).float().flip(0)
        for piece, part in zip(pieces, logits.split(list(counts)), strict=True):
            piece.append(part)
        done = batch.layout.contexts
    return [torch.cat(piece) for piece in pieces]
