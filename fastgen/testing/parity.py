"""Are two tables of logits equal, and if they are not, what should the author of an adapter look at?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Landmarks", "allowed", "assert_equal", "difference"]


@dataclass(frozen=True)
class Landmarks:
    """Lengths at which a model's maths changes, to tell what a difference that begins there means."""

    windows: Sequence[int] = ()
    """Of the decoder's attention layers."""
    originals: Sequence[int] = ()
    """Lengths its ropes were trained for, before they were stretched."""
    block_size: int = 0


def allowed(want: torch.Tensor, tolerance: float) -> float:
    """The largest difference that is rounding: ``tolerance``, for logits of the usual size (about 16 at most), and in
    proportion for larger ones."""
    return tolerance * max(1.0, want.abs().max().item() / 16)


def difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The largest difference at each position, ``[tokens]``; infinite where something is not a number."""
    return (got - want).abs().amax(-1).nan_to_num(float("inf"))


def assert_equal(
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: float,
    what: str,
    *,
    landmarks: Landmarks = Landmarks(),
    where: Callable[[], str] = str,
    alone: bool = True,
) -> None:
    """``got`` and ``want``, ``[tokens, vocab]``, agree at all positions.

    Args:
        what: the check, for the message.
        where: asked for more about the place of the fault, if there is one.
        alone: whether this is the plain pass over one whole prompt. If not, that one agreed, and the fault lies in what
            differs from it.

    Raises:
        AssertionError: says from which position on they differ and what to look at.
    """
    if got.shape != want.shape:
        raise AssertionError(
            f"{what}: the logits are {list(got.shape)}, the reference's {list(want.shape)} [tokens, vocab]: "
            "check the head, and vocab_size"
        )
    limit, off = allowed(want, tolerance), difference(got, want)
    wrong = (off > limit).nonzero().flatten().tolist()
    if not wrong:
        return
    worst = int(off.argmax())
    told = (
        f"{what}: logits differ from the reference's by up to {off[worst]:.2g} (at position {worst}; {limit:.1g} is "
        f"allowed), at {len(wrong)} of {len(off)} positions, the first of them {wrong[0]}."
    )
    advice = _advice(got, wrong[0], landmarks) if alone else _advice_between(wrong[0], landmarks)
    raise AssertionError(" ".join(part for part in (told, advice, where()) if part))


def _advice(got: torch.Tensor, first: int, landmarks: Landmarks) -> str:
    if got[first:].isnan().any():
        return "Some are NaN: a part is unfilled, or a norm or softmax divides by nothing."
    if first == 0:
        return (
            "The first position is wrong already, and it sees only itself: check the embedding (scale, positions), the "
            "norms (eps, offset, order), the MLP (gate and up, activation), the value and output projections, the "
            "order of the block's branches, the head; or a rule of the weight map."
        )
    for window in landmarks.windows:
        if first in (window - 1, window):
            return (
                f"All is equal up to the length of the window, {window}: check window= (tokens a query sees, itself "
                "included) and which layers have it."
            )
    for original in landmarks.originals:
        if original - 1 <= first <= original + 1:
            return (
                f"All is equal up to {original} tokens, the length the rope was made for: check the rope's scaling, "
                "and its regime."
            )
    if first <= 2:
        return (
            "Position 0 is equal, where a token sees only itself, and later ones are not: check how queries and keys "
            "meet (rope: pairing, theta, rotary_dim, which layers have it; the scale of the scores; query and key "
            "norms; the order of key and value heads)."
        )
    return (
        f"Equal before position {first}: check what begins there (a window that the adapter leaves out, a rope whose "
        "scaling depends on the length, a routed expert that few tokens visit)."
    )


def _advice_between(first: int, landmarks: Landmarks) -> str:
    advice = (
        "The pass over the whole prompt at once is checked by test_prefill; if that one passes, something is lost or "
        "mixed up between passes or sequences: a part that keeps state, uses the row's place in the batch in place of "
        "batch.positions, or reads beside the cache."
    )
    if landmarks.block_size and first % landmarks.block_size == 0:
        advice += f" Position {first} is the first of a block (of {landmarks.block_size})."
    return advice
