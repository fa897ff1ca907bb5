"""Factors whose rows the weight map takes apart: fused and transposed checkpoint modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastgen.core.checkpoint import Checkpoint
from fastgen.core.layers import Experts, Linear
from fastgen.core.lora import Loras, plan_loras
from fastgen.core.lora.rows import row_map
from fastgen.core.weight_map import WeightMap
from fastgen.core.weights import load, plan
from fastgen.errors import FastgenError, UnsupportedModelError
from fastgen.kernels.ops import KernelTable
from fastgen.kernels.reference import IMPLEMENTATIONS
from fastgen.testing.adapters import lora_factors, random_lora

IN, Q, KV, GROUPS = 10, 8, 4, 2
OUT = Q + 2 * KV


def split(weight, _config):
    q, k, v = weight.split([Q, KV, KV])
    return {"q": q, "k": k, "v": v}


def split_groups(weight, _config):
    """Rows of each group together: ``[q q k v]`` twice, heads of width 2."""
    grouped = weight.view(GROUPS, 4, 2, *weight.shape[1:])
    parts = {"q": grouped[:, :2], "k": grouped[:, 2:3], "v": grouped[:, 3:]}
    return {slot: part.reshape(-1, *weight.shape[1:]) for slot, part in parts.items()}


def transposed(weight, _config):
    return split(weight.t() if weight.ndim == 2 else weight, _config)


def columns_moved(weight, _config):
    return split(weight.flip(-1) if weight.ndim == 2 else weight, _config)


def scaled(weight, _config):
    return split(weight * 2, _config)


def shifted(weight, _config):
    return split(1 + weight, _config)


ROW_WISE = [split, split_groups, transposed]
SLOTS = {"q": Q, "k": KV, "v": KV}


@pytest.mark.parametrize("transform", ROW_WISE)
def test_row_map_does_to_rows_what_the_transform_does(transform):
    found = row_map(transform, None, OUT, IN)
    assert found is not None
    assert found.transposed == (transform is transposed)
    weight = torch.randn(OUT, IN)
    for slot, part in transform(weight.t() if found.transposed else weight, None).items():
        assert torch.equal(weight[found.slots[slot]], part)


@pytest.mark.parametrize("transform", [columns_moved, scaled, shifted])
def test_row_map_refuses_what_is_more_than_rows(transform):
    assert row_map(transform, None, OUT, IN) is None


def test_row_map_refuses_sizes_that_cannot_be_taken_apart():
    assert row_map(split, None, OUT + 1, IN) is None
    assert row_map(lambda w, _: {"": w.reshape(-1)}, None, OUT, IN) is None


def test_row_map_of_a_square_transposed_weight():
    """Its shape does not tell which way it is stored; its rows do."""
    found = row_map(lambda w, _: {"": w.t()}, None, 6, 6)
    assert found is not None
    assert found.transposed
    assert found.slots[""].tolist() == [0, 1, 2, 3, 4, 5]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Linear(IN, SLOTS, bias=True)
        self.out = Linear(OUT, IN)

    def match(self, shapes):
        return None

    def forward(self, x):
        return self.out(self.qkv(x))


@dataclass
class Case:
    model: Toy
    weights: WeightMap
    checkpoint: Checkpoint
    kernels: KernelTable

    def plan(self, **loras):
        return plan_loras(
            {name: str(directory) for name, directory in loras.items()},
            model=self.model,
            weights=self.weights,
            config=None,
            checkpoint=self.checkpoint,
            model_name="toy",
        )


@pytest.fixture
def make(tmp_path) -> Callable[[Callable], Case]:
    def build(transform: Callable) -> Case:
        weights = WeightMap({"h.c_attn": ("qkv", transform), "h.c_proj": "out"})
        generator = torch.Generator().manual_seed(0)
        shape = (IN, OUT) if transform is transposed else (OUT, IN)
        tensors = {
            "h.c_attn.weight": torch.randn(shape, generator=generator),
            "h.c_attn.bias": torch.randn(OUT, generator=generator),
            "h.c_proj.weight": torch.randn(IN, OUT, generator=generator),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.of_file(tmp_path / "model.safetensors")
        model = Toy()
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        load(model, plan(model, weights, None, shapes), None, checkpoint)
        return Case(model, weights, checkpoint, KernelTable("cpu", "float32", list(IMPLEMENTATIONS), []))

    return build


def run(case: Case, x: torch.Tensor, runs, loras: Loras | None = None) -> torch.Tensor:
    for module in case.model.modules():
        if isinstance(module, Linear):
            module.bind(case.kernels)
    if loras is None:
        return case.model(x)
    with loras.rows(runs, []):
        return case.model(x)


@torch.no_grad()
@pytest.mark.parametrize("transform", ROW_WISE)
def test_a20_fused_and_transposed_modules(make, tmp_path, transform):
    """Compared with the merged weight taken apart by the map itself."""
    modules = {"h.c_attn": (OUT, IN), "h.c_proj": (IN, OUT)}
    settings = {"fan_in_fan_out": True} if transform is transposed else {}
    one = random_lora(tmp_path / "one", {"h.c_attn": (OUT, IN)}, rank=3, alpha=6, **settings)
    two = random_lora(tmp_path / "two", modules, rank=2, alpha=5, seed=1)
    x = torch.randn(9, IN)
    base = make(transform)
    wanted = {None: run(base, x, [])}
    for name, directory, scale in (("one", one, 2.0), ("two", two, 2.5)):
        merged = make(transform)
        for module, (a, b) in lora_factors(directory).items():
            delta = scale * (b @ a)
            parts = (
                {"": delta}
                if module == "h.c_proj"
                else transform(delta.t() if transform is transposed else delta, None)
            )
            layer = merged.model.get_submodule("out" if module == "h.c_proj" else "qkv")
            for slot, part in parts.items():
                layer.place(slot, "weight").add_(part)
        wanted[name] = run(merged, x, [])
    assert not torch.allclose(wanted["one"], wanted["two"])

    case = make(transform)
    loras = Loras(case.plan(one=one, two=two), torch.device("cpu"))
    loras.attach(case.model, torch.float32)
    runs = [("one", 2), (None, 1), ("two", 1), ("one", 1), ("two", 3), (None, 1)]
    got = run(case, x, runs, loras)
    names = [name for name, count in runs for _ in range(count)]
    torch.testing.assert_close(
        got, torch.stack([wanted[name][i] for i, name in enumerate(names)]), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(run(case, x, [("two", 9)], loras), wanted["two"], atol=1e-5, rtol=1e-5)
    assert torch.equal(run(case, x, [(None, 9)], loras), wanted[None])


@pytest.mark.parametrize("transform", [columns_moved, scaled])
def test_a_transform_that_does_more_is_refused(make, tmp_path, transform):
    case = make(transform)
    adapter = random_lora(tmp_path / "a", {"h.c_attn": (OUT, IN)})
    with pytest.raises(UnsupportedModelError, match="does more with that weight than move its rows"):
        case.plan(a=adapter)
    assert case.plan(b=random_lora(tmp_path / "b", {"h.c_proj": (IN, OUT)}))  # the other part is as ever


def refusal(case: Case, adapter) -> str:
    with pytest.raises(FastgenError) as caught:
        case.plan(a=adapter)
    return str(caught.value)


def test_fan_in_fan_out_must_be_true_of_every_module(make, tmp_path):
    adapter = random_lora(tmp_path / "a", {"h.c_attn": (OUT, IN), "h.c_proj": (IN, OUT)}, fan_in_fan_out=True)
    assert "this model's h.c_proj is stored [out, in]" in refusal(make(transposed), adapter)


def test_a_fused_module_of_another_size(make, tmp_path, monkeypatch):
    """Refused before its rows are tried out: two thin factors can claim a product that no memory holds."""
    monkeypatch.setattr("fastgen.core.lora.plan.row_map", pytest.fail)
    adapter = random_lora(tmp_path / "a", {"h.c_attn": (OUT + 1, IN)})
    assert f"map {IN} -> {OUT + 1}, the model's {IN} -> " in refusal(make(split), adapter)


# ---- parts that no adapter may touch -------------------------------------------------------------------------------


class Special(Linear):
    """A stranger's part: what an adapter adds would have to be doubled too."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (Special(IN, 6), "part"),
        (Experts(2, IN, 3, "silu"), "part"),
        (nn.ModuleList([nn.ModuleList([Linear(IN, 6)])]), "part.0.0"),
    ],
    ids=["subclass", "experts", "numbered"],
)
def test_parts_that_are_no_plain_linear(tmp_path, part, path):
    model = nn.Module()
    model.part = part
    save_file({"w.weight": torch.zeros(6, IN)}, tmp_path / "model.safetensors")
    case = Case(model, WeightMap({"w": path}), Checkpoint.of_file(tmp_path / "model.safetensors"), None)
    with pytest.raises(UnsupportedModelError, match="w, which is no linear part that every token passes"):
        case.plan(a=random_lora(tmp_path / "a", {"w": (6, IN)}))


def test_a_shared_part_gets_its_adapter_everywhere(make, tmp_path):
    case = make(split)
    case.model.again = case.model.qkv
    loras = Loras(case.plan(a=random_lora(tmp_path / "a", {"h.c_attn": (OUT, IN)})), torch.device("cpu"))
    loras.attach(case.model, torch.float32)
    assert case.model.again is case.model.qkv
    assert type(case.model.qkv) is not Linear


def test_a_part_that_reads_the_weight_of_another_fails_aloud(make, tmp_path):
    case = make(split)
    loras = Loras(case.plan(a=random_lora(tmp_path / "a", {"h.c_attn": (OUT, IN)})), torch.device("cpu"))
    loras.attach(case.model, torch.float32)
    with pytest.raises(AttributeError, match="weight"):
        _ = case.model.qkv.weight
    wrapped = SimpleNamespace(**vars(case.model.qkv))
    assert (wrapped.in_features, wrapped.out_features, wrapped.slots) == (IN, OUT, SLOTS)


def test_a_part_that_sees_other_rows_fails_aloud(make, tmp_path):
    """Rows in another number would get another request's adapter."""
    case = make(split)
    loras = Loras(case.plan(a=random_lora(tmp_path / "a", {"h.c_attn": (OUT, IN)})), torch.device("cpu"))
    loras.attach(case.model, torch.float32)
    with pytest.raises(RuntimeError, match=r"LoRA cannot act on qkv: its input is \[4, 10\] in a pass of 9 rows"):
        run(case, torch.randn(4, IN), [("a", 5), (None, 4)], loras)
