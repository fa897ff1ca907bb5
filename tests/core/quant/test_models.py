"""A quantised model is the float model with the weights that its packed ones stand for, and rounded activations."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fastgen.core.containers import Decoder
from fastgen.core.layers import Experts, Head, Linear
from fastgen.core.quant import Quantisation, plan_quantisation
from fastgen.core.quant.matrix import Matrix
from fastgen.kernels import reference
from fastgen.kernels.quantisation import GROUPS
from fastgen.testing.driver import HandDriver, draw_model, load_decoder

SCHEMES = ["int8", "int4"]


def logits(model: Decoder) -> torch.Tensor:
    """Of all positions of three prompts, in one ragged pass."""
    rng = random.Random(0)
    driver = HandDriver(model)
    sequences = [driver.add([rng.randrange(3, 64) for _ in range(length)]) for length in (1, 40, 23)]
    return torch.cat(driver.run([(one, len(one.tokens)) for one in sequences]))


def divergences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The Kullback-Leibler divergence of each position, in nats."""
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Their mean."""
    return divergences(one, other).mean().item()


def agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of positions with the same best token."""
    return (one.argmax(-1) == other.argmax(-1)).double().mean().item()


def stand_for(matrix: Matrix, weights: torch.Tensor) -> torch.Tensor:
    """``unpack(pack(weights))``."""
    rows = matrix.pack(weights)[:, : matrix.size]
    return torch.stack(
        [matrix.kernel.unpack(matrix.scheme, row, matrix.out_features, matrix.in_features) for row in rows]
    )


def rounded_linear(scheme: str) -> Callable[..., torch.Tensor]:
    """A linear map whose input is rounded as the scheme does it: to 255 levels in each group, by its greatest; for int8
    where the group is rotated by a Hadamard matrix (Sylvester's)."""
    size = GROUPS[scheme]
    turn = torch.eye(size)
    if scheme == "int8":
        turn = torch.ones(1, 1)
        while len(turn) < size:
            turn = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), turn)
        turn = turn / size**0.5

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        groups = F.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size) @ turn
        steps = groups.abs().amax(-1, keepdim=True).clamp(min=1e-20) / 127
        rounded = (groups / steps).round() * steps @ turn
        return F.linear(rounded.flatten(1)[:, : x.shape[1]], weight, bias)

    return linear


def one_by_one(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The operation ``experts``, token by token."""

    def experts(x, gate_up, down, chosen, weights, activation):
        out = torch.zeros_like(x)
        for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                gate, up = linear(x[token : token + 1], gate_up[expert], None).chunk(2, -1)
                inner = reference.ACTIVATIONS[activation](gate) * up
                out[token] += share * linear(inner, down[expert], None)[0]
        return out

    return experts


@functools.cache
def stand_in(directory: Path, scheme: str, rounding: bool) -> torch.Tensor:
    """Logits of the float model with the weights that its packed ones stand for."""
    blueprint = draw_model(directory)
    model = load_decoder(directory)
    for part in plan_quantisation(blueprint.model, scheme, blueprint.kernels).parts:
        weights = part.weights(model)
        changed = {name: stand_for(matrix, weights[name]) for name, matrix in part.matrices.items()}
        linears = [rounded_linear(m.scheme) if rounding else F.linear for m in part.matrices.values()]
        module = model.get_submodule(part.path)
        if isinstance(module, Experts):
            module.substitute(changed["gate_up"], changed["down"], one_by_one(linears[0]))
        else:
            assert isinstance(module, Linear | Head)
            module.substitute(changed["weight"][0], linears[0])
    model.bind(blueprint.kernels)
    return logits(model)


@functools.cache
def plain(directory: Path) -> torch.Tensor:
    return logits(load_decoder(directory))


def quantised(directory: Path, scheme: str, **options) -> Decoder:
    return load_decoder(directory, quantization=scheme, packed_cache=False, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_part_computes_what_its_packed_weights_stand_for(checkpoint, family, scheme):
    """Compared with rounding written here: what is left is the order of sums, now and then a value that rounds the
    other way, and, where a rotated group is filled up with zeros, the product of two rounding errors there."""
    directory = checkpoint(family)
    got, expected = logits(quantised(directory, scheme)), stand_in(directory, scheme, rounding=True)
    assert divergence(expected, got) < 5e-4
    assert agreement(expected, got) >= 0.95
    # The measure tells a scheme from another, and either from the float model.
    other = SCHEMES[1 - SCHEMES.index(scheme)]
    assert divergence(stand_in(directory, other, rounding=True), got) > 1e-2
    assert divergence(plain(directory), got) > 3 * divergence(expected, got)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounding_activations_costs_little(checkpoint, family, scheme):
    """The median, since in a mixture of random experts some tokens take another way, which costs them much."""
    directory = checkpoint(family)
    got, expected = logits(quantised(directory, scheme)), stand_in(directory, scheme, rounding=False)
    assert divergences(expected, got).median().item() < 0.01
    assert agreement(expected, got) >= (0.75 if "router" in family else 0.9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_damaged_scale_is_noticed(checkpoint, scheme):
    directory = checkpoint("llama")
    model = quantised(directory, scheme)
    packed = model.get_submodule("blocks.1.mlp.down").weight
    quantisation = plan(directory, scheme)
    (matrix,) = [m for part in quantisation.parts if part.path == "blocks.1.mlp.down" for m in part.matrices.values()]
    weight = matrix.kernel.unpack(scheme, packed, matrix.out_features, matrix.in_features)
    weight[5] *= 1.5  # one output of one part
    packed.copy_(matrix.kernel.pack(scheme, weight))
    assert divergence(stand_in(directory, scheme, rounding=True), logits(model)) > 5e-4


def plan(directory: Path, scheme: str, **options) -> Quantisation:
    quantisation = draw_model(directory, quantization=scheme, **options).quantisation
    assert quantisation is not None
    return quantisation


# ---- what is packed -------------------------------------------------------------------------------------------------


def test_linears_of_every_block_and_the_head_are_packed(checkpoint):
    quantisation = plan(checkpoint("llama"), "int4")
    schemes = {part.path: {m.scheme for m in part.matrices.values()} for part in quantisation.parts}
    inner = [f"blocks.{block}.{part}" for block in (0, 1) for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")]
    assert schemes == {**{path: {"int4"} for path in inner}, "head.proj": {"int8"}}
    assert quantisation.kept == ()


def test_a_tied_head_packs_a_copy_and_the_table_stays(checkpoint):
    model = quantised(checkpoint("llama, tied"), "int8")
    assert model.embed.tokens.weight.dtype == torch.float32
    assert model.head.weight.dtype == torch.uint8
    assert "head.weight" in dict(model.named_parameters())


def test_routers_and_gates_stay_precise(checkpoint):
    for family, kept in (
        ("mixtral: a router", {"blocks.0.mlp.router", "blocks.1.mlp.router"}),
        ("qwen2 moe: a shared expert", {f"blocks.{b}.mlp.{p}" for b in (0, 1) for p in ("routed.router", "gate")}),
    ):
        quantisation = plan(checkpoint(family), "int8")
        assert {one.path for one in quantisation.kept} == kept
        assert all("routes or gates" in one.reason for one in quantisation.kept)
        model = quantised(checkpoint(family), "int8")
        assert {model.get_submodule(path).weight.dtype for path in kept} == {torch.float32}


def test_bytes_are_counted_as_packed(checkpoint, family):
    blueprint = draw_model(checkpoint(family), quantization="int8", dtype="bfloat16")
    loaded = load_decoder(checkpoint(family), quantization="int8", dtype="bfloat16", packed_cache=False)
    assert blueprint.weight_bytes == sum(p.numel() * p.element_size() for p in loaded.parameters())
    assert blueprint.quantisation.model_bytes_before == draw_model(checkpoint(family), dtype="bfloat16").weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(checkpoint, dtype):
    got = logits(quantised(checkpoint("llama"), "int8", dtype=dtype))
    assert got.dtype == getattr(torch, dtype)
    assert divergence(plain(checkpoint("llama")), got) < 0.02
