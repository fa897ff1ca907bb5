"""Each stage against transformers' own processor, on the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from fastgen.core.runtime import logits as stages

INF = float("inf")


def random_rows(vocab: int = 500, rows: int = 12, seed: int = 0) -> Tensor:
    """Rows of every kind: flat, peaked, half masked, coarse (many ties), one finite entry."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.1, 8, rows)[:, None]
    scores[2, torch.randperm(vocab, generator=generator)[: vocab // 2]] = -INF
    scores[3, :-1] = -INF
    return scores


def kept(scores: Tensor) -> Tensor:
    return scores > -INF


def with_no_history(processor: theirs.LogitsProcessor, scores: Tensor) -> Tensor:
    return processor(torch.zeros(len(scores), 1, dtype=torch.long), scores.clone())


@pytest.fixture(params=[1, 2, 3])
def scores(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    rows = random_rows(seed=request.param)
    untouched = rows.clone()
    yield rows
    assert torch.equal(rows, untouched), "a test changed its input"


@pytest.mark.parametrize("k", [1, 2, 50, 499, 500])
def test_c4_top_k(scores: Tensor, k: int) -> None:
    expected = with_no_history(theirs.TopKLogitsWarper(k), scores)
    ours = scores.clone()
    stages.keep_top_k_(ours, torch.full((len(scores),), k))
    assert torch.equal(ours, expected)


def test_c4_top_k_of_its_own_for_each_row() -> None:
    scores = random_rows(vocab=5000)
    ks = [1, 5, 1500, 2, 4999, 5000, 7, 1024, 1025, 3, 9, 11]
    ours = scores.clone()
    stages.keep_top_k_(ours, torch.tensor(ks))
    for row, k in enumerate(ks):
        alone = with_no_history(theirs.TopKLogitsWarper(k), scores[row : row + 1])
        assert torch.equal(ours[row : row + 1], alone), (row, k)


@pytest.mark.parametrize("levels", [3, 40, 10**6])
@pytest.mark.parametrize("k", [1, 7, 63, 64, 200])
def test_candidates_are_the_top_k(levels: int, k: int) -> None:
    """In order of their ids; or the row is marked, because equals of the k-th are beyond the width."""
    scores = torch.randint(0, levels, (20, 1000), generator=torch.Generator().manual_seed(k)).float()
    expected = with_no_history(theirs.TopKLogitsWarper(k), scores)
    width = stages.candidate_width(k)
    values, ids, incomplete = stages.candidates(scores, torch.full((20,), k), width)
    found = torch.full_like(scores, -INF).scatter(1, ids, values)
    assert bool((ids.diff() > 0).all())
    assert values.shape == ids.shape == (20, width)
    assert torch.equal(found[~incomplete], expected[~incomplete])
    assert torch.equal(incomplete, (kept(expected).sum(-1) >= width))


@pytest.mark.parametrize("vocab", [1000, 1001, 4096, 49152, 50257])
@pytest.mark.parametrize("width", [64, 256])
def test_candidates_of_any_vocabulary(vocab: int, width: int) -> None:
    """The best lie anywhere: in the last columns too, and side by side."""
    scores = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[1, -50:] += 10
    scores[2, :50] += 10
    scores[3] = scores[3].sort().values
    values, ids, incomplete = stages.candidates(scores, torch.full((6,), 50), width)
    assert not bool(incomplete.any())
    assert torch.equal(values.sort(-1, descending=True).values[:, :50], scores.topk(50).values)
    chosen = kept(values)
    assert torch.equal(scores.gather(1, ids)[chosen], values[chosen])
    assert bool((ids.diff() > 0).all())


def language_like(vocab: int, rows: int, seed: int, *, coarse: bool = False) -> Tensor:
    """A few likely tokens and a long tail; ``coarse``: in steps, as of 16-bit logits, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, vocab + 1).log()
    scores = torch.stack(
        [-s * ranks[torch.randperm(vocab, generator=generator)] for s in torch.linspace(0.9, 2.5, rows)]
    )
    scores += 0.1 * torch.randn(rows, vocab, generator=generator)
    return (scores * 8).round() / 8 if coarse else scores


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.9999])
@pytest.mark.parametrize("width", [256, 2048])
def test_c4_the_nucleus_is_the_top_p(p: float, width: int, coarse: bool) -> None:
    """Of rows that it vouches for, as in transformers; of equals at the cut, as many, and those with the lowest ids."""
    scores = language_like(20000, 24, seed=int(p * 100), coarse=coarse)
    expected = with_no_history(theirs.TopPLogitsWarper(p), scores)
    full = scores.clone()
    stages.keep_top_p_(full, torch.full((24,), p, dtype=torch.float64))
    values, ids, incomplete = stages.nucleus(
        scores, stages.total_weight(scores), torch.full((24,), p, dtype=torch.float64), width
    )
    found = torch.full_like(scores, -INF).scatter(1, ids, values)
    sure = ~incomplete
    assert torch.equal(found[sure], full[sure])
    assert torch.equal(found[sure].sort(-1).values, expected[sure].sort(-1).values)
    assert bool(incomplete[kept(expected).sum(-1) >= width].all())
    fits = kept(expected).sum(-1) < width // 2
    assert int((fits & incomplete).sum()) <= (24 if p > 0.999 else 2), "it gives up too easily"


def test_a_nucleus_whose_cut_is_left_to_rounding_is_not_vouched_for() -> None:
    """Equal steps that add up to exactly 1 - p."""
    scores = torch.zeros(2, 2048).index_fill_(1, torch.arange(1000, 2048), -INF)
    scores[1, 0] = 1.0
    *_, incomplete = stages.nucleus(
        scores, stages.total_weight(scores), torch.tensor([0.1, 0.1], dtype=torch.float64), 256
    )
    assert incomplete.tolist() == [True, True]
    scores = torch.arange(8.0).flip(0).repeat(2, 256)[:, :2000]
    scores[:, 8:] = -INF
    weights = scores[0].double().softmax(-1)
    p = float(weights[:3].sum())
    *_, incomplete = stages.nucleus(
        scores, stages.total_weight(scores), torch.tensor([p, p + 1e-4], dtype=torch.float64), 256
    )
    assert incomplete.tolist() == [True, False]


def test_draw_by_blocks_inverts_the_same_distribution() -> None:
    """Against numpy over the whole row, at edges of steps and of blocks."""
    scores = language_like(5003, 8, seed=3)
    scores[1, :2600] = -INF
    scores[2, 600:] = -INF
    weights = scores.softmax(-1).double().numpy()
    weights /= weights.sum(-1, keepdims=True)
    cumulative = weights.cumsum(-1)
    for at in (0.0, 0.1, 0.3, 0.5, 0.77, 0.999, 1 - 2.0**-53):
        found = stages.draw(scores, torch.full((8,), at, dtype=torch.float64)).numpy()
        rows = np.arange(8)
        assert (weights[rows, found] > 0).all()
        assert (cumulative[rows, found] >= at - 1e-12).all()
        assert (cumulative[rows, found] - weights[rows, found] <= at + 1e-12).all()


def test_candidate_widths() -> None:
    assert [stages.candidate_width(k) for k in (0, 1, 63, 64, 127, 1024, 1025)] == [0, 64, 64, 128, 128, 2048, 0]


@pytest.mark.parametrize("p", [1e-9, 0.01, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1 - 1e-6, 1 - 1e-9])
def test_c4_top_p(scores: Tensor, p: float) -> None:
    expected = with_no_history(theirs.TopPLogitsWarper(p), scores)
    ours = scores.clone()
    stages.keep_top_p_(ours, torch.full((len(scores),), p, dtype=torch.float64))
    assert torch.equal(ours, expected)
    assert kept(ours).any(-1).all()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("levels", [1, 2, 5, 30])
def test_c4_top_p_with_ties_at_the_cut(p: float, levels: int) -> None:
    """As many of each value stay as in transformers (which of the equals do is open there); here the lowest ids."""
    scores = torch.randint(0, levels, (16, 400), generator=torch.Generator().manual_seed(levels)).float()
    expected = with_no_history(theirs.TopPLogitsWarper(p), scores)
    ours = scores.clone()
    stages.keep_top_p_(ours, torch.full((16,), p, dtype=torch.float64))
    assert torch.equal(ours.sort(-1).values, expected.sort(-1).values)
    for row in range(16):
        lowest = float(ours[row][kept(ours[row])].min())
        ties = (scores[row] == lowest).nonzero().flatten()
        stayed = kept(ours[row, ties])
        assert bool((stayed[:-1] >= stayed[1:]).all())


@pytest.mark.parametrize("p", [1e-6, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_c4_min_p(scores: Tensor, p: float) -> None:
    expected = with_no_history(theirs.MinPLogitsWarper(p), scores)
    ours = scores.clone()
    stages.keep_min_p_(ours, torch.full((len(scores),), p))
    assert torch.equal(ours, expected)
    assert kept(ours).any(-1).all()


@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 0.999, 1.5, 3.0, 100.0])
def test_temperature(scores: Tensor, temperature: float) -> None:
    expected = with_no_history(theirs.TemperatureLogitsWarper(temperature), scores)
    ours = scores.clone()
    stages.scale_(ours, torch.full((len(scores),), temperature))
    assert torch.equal(ours, expected)


def test_c1_temperature_never_overflows() -> None:
    largest = torch.finfo(torch.float32).max
    ours = torch.tensor([[largest, 1.0, -largest], [-largest, -largest, -INF], [40000.0, 39999.0, -INF]])
    stages.scale_(ours, torch.tensor([0.5, 0.1, 1e-5]))
    assert torch.equal(ours[:, 0], torch.zeros(3))
    assert ours.softmax(-1).isfinite().all()


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 2.0])
def test_repetition_penalty(scores: Tensor, penalty: float) -> None:
    history = torch.randint(0, 500, (len(scores), 40), generator=torch.Generator().manual_seed(4))
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(history, scores.clone())
    unique = [row.unique() for row in history]
    ids = torch.cat(unique)
    rows = torch.repeat_interleave(torch.arange(len(scores)), torch.tensor([len(part) for part in unique]))
    ours = scores.clone()
    zeros = torch.zeros(len(ids))
    stages.penalize_(ours, rows, ids, zeros, torch.full((len(ids),), penalty), zeros, zeros)
    assert torch.equal(ours, expected)


def test_bias_and_forbidden_ids_in_some_rows_only() -> None:
    scores = random_rows(vocab=9, rows=4)
    ours = scores.clone()
    stages.add_bias_(ours, torch.tensor([0, 0, 2]), torch.tensor([8, 1, 1]), torch.tensor([5.0, -100.0, 0.25]))
    stages.forbid_(ours, torch.tensor([1]), torch.tensor([4]))
    expected = scores.clone()
    bias = theirs.SequenceBiasLogitsProcessor({(8,): 5.0, (1,): -100.0})
    expected[:1] = with_no_history(bias, scores[:1])
    expected[2:3] = with_no_history(theirs.SequenceBiasLogitsProcessor({(1,): 0.25}), scores[2:3])
    expected[1, 4] = -INF
    assert torch.equal(ours, expected)


def numpy_set(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What survives, by the definitions, in float64."""
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > -np.inf]
    if top_k > 0:
        order = order[scores[order] >= scores[order[min(top_k, len(order)) - 1]]]
    weights = np.exp(scores[order] - scores[order[0]])
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    order = order[: max(1, int((before < top_p).sum()))] if top_p < 1 else order
    weights = np.exp(scores[order] - scores[order[0]])
    return set(order[weights >= min_p].tolist())


CORNERS = [
    # top_k, top_p, min_p
    (0, 1.0, 0.0),
    (-1, 1.0, 0.0),
    (1, 1.0, 0.0),
    (2, 1.0, 0.0),
    (8, 1.0, 0.0),
    (10**6, 1.0, 0.0),
    (0, 1e-12, 0.0),
    (0, 0.05, 0.0),
    (0, 0.33, 0.0),
    (0, 0.5, 0.0),
    (0, 0.75, 0.0),
    (0, 0.9, 0.0),
    (0, 0.99, 0.0),
    (0, 1.0, 0.01),
    (0, 1.0, 0.2),
    (0, 1.0, 0.7),
    (0, 1.0, 1.0),
    (3, 0.6, 0.0),
    (5, 0.9, 0.0),
    (5, 0.9, 0.3),
    (0, 0.8, 0.25),
    (1, 0.5, 0.5),
    (20, 0.95, 0.05),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CORNERS)
def test_c4_table_against_numpy(top_k: int, top_p: float, min_p: float) -> None:
    scores = random_rows(vocab=30, seed=9)
    ours = scores.clone()
    count = len(scores)
    if 0 < top_k < 30:
        stages.keep_top_k_(ours, torch.full((count,), top_k))
    if top_p < 1:
        stages.keep_top_p_(ours, torch.full((count,), top_p, dtype=torch.float64))
    if min_p > 0:
        stages.keep_min_p_(ours, torch.full((count,), min_p))
    for row in range(count):
        found = set(kept(ours[row]).nonzero().flatten().tolist())
        assert found == numpy_set(scores[row].double().numpy(), top_k, top_p, min_p), row
    assert torch.equal(ours[kept(ours)], scores[kept(ours)]), "survivors keep their scores"


def test_draw_inverts_the_distribution() -> None:
    """At the edges of each token's step, computed by hand from weights 1, 2, 0, 5."""
    scores = torch.tensor([0.125, 0.25, 0.0, 0.625]).log().expand(6, 4).contiguous()
    at = torch.tensor([0.0, 0.1249, 0.1251, 0.3749, 0.3751, 1 - 2.0**-53], dtype=torch.float64)
    assert stages.draw(scores, at).tolist() == [0, 0, 1, 1, 3, 3]


def test_draw_at_the_edges_of_equal_steps() -> None:
    """A step holds its lower edge; tokens of probability zero have none."""
    scores = torch.tensor([-INF, 0.0, 0.0, -INF, 0.0, 0.0]).expand(4, 6).contiguous()
    assert stages.draw(scores, torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)).tolist() == [1, 2, 4, 5]


def test_c9_no_draw_returns_a_masked_token() -> None:
    scores = torch.full((4, 8), -INF)
    scores[0, 3] = scores[1, 0] = scores[2, 7] = 1.0
    scores[3, 2:4] = torch.tensor([0.0, -200.0])  # the second underflows to probability zero
    for at in (0.0, 0.5, 1 - 2.0**-53):
        assert stages.draw(scores, torch.full((4,), at, dtype=torch.float64)).tolist() == [3, 0, 7, 2]
