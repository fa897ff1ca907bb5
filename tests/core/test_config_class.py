"""Config classes declared over ``fg.HFConfig`` are pydantic models when they are used, and nothing before."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from fastgen import api as fg
from fastgen.core import hf_config
from fastgen.core.config_class import realise

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class FooConfig(fg.HFConfig):
    """Has a field, a default of its own and methods."""

    defaults: ClassVar = {"norm_eps": 0.5}
    shade: int = 3
    layers: list[str] | None = None

    @property
    def double(self) -> int:
        return 2 * self.shade

    @classmethod
    def from_raw(cls, raw: Any) -> Any:
        return super().from_raw({"shade": 4, **raw})


class BarConfig(FooConfig):
    shade: int = 5

    @classmethod
    def from_raw(cls, raw: Any) -> Any:
        return super().from_raw(raw)


def test_it_is_the_real_thing_when_used() -> None:
    config = FooConfig.from_raw(SIZES)
    assert (config.shade, config.double, config.norm_eps, config.rope.type) == (4, 8, 0.5, "default")
    assert isinstance(config, FooConfig)
    assert isinstance(config, fg.HFConfig)
    assert isinstance(config, hf_config.HFConfig)
    assert type(config).__name__ == "FooConfig"
    assert type(config).__doc__ == "Has a field, a default of its own and methods."
    assert config.model_copy(update={"shade": 1}).double == 2
    assert type(config) is realise(FooConfig) is realise(realise(FooConfig))
    with pytest.raises(fg.ConfigError, match="shade"):
        FooConfig.from_raw({**SIZES, "shade": "dark"})
    with pytest.raises(ValueError, match="frozen"):
        config.shade = 7


def test_inheritance() -> None:
    config = BarConfig.from_raw(SIZES)
    assert (config.shade, config.norm_eps) == (4, 0.5)
    assert isinstance(config, FooConfig)
    assert not isinstance(FooConfig.from_raw(SIZES), BarConfig)
    assert issubclass(BarConfig, fg.HFConfig)
    assert issubclass(realise(BarConfig), FooConfig)
    assert not issubclass(realise(FooConfig), BarConfig)
    assert not issubclass(dict, fg.HFConfig)
    assert BarConfig.model_fields["shade"].default == 5
    assert set(realise(BarConfig).model_fields) > {"shade", "layers", "hidden_size"}


def test_made_by_a_call() -> None:
    config = FooConfig(**SIZES, num_key_value_heads=4, head_dim=8)
    assert (type(config), config.shade) == (realise(FooConfig), 3)


def test_pickled() -> None:
    config = BarConfig.from_raw(SIZES)
    again = pickle.loads(pickle.dumps(config))
    assert (type(again), again) == (type(config), config)


def test_fields_that_pydantic_cannot_use_are_the_plugins_fault() -> None:
    class Odd(fg.HFConfig):
        shade = 3  # no annotation

    with pytest.raises(fg.PluginError, match=r"plugin 'odd' is broken: the config class .* `shade = 3`"):
        fg.ModelSpec(("A",), Odd, len, fg.DECODER_WEIGHTS, plugin="odd").load()


def test_declaring_imports_no_pydantic() -> None:
    code = (
        "import sys\nfrom fastgen import api as fg\n"
        "class C(fg.HFConfig):\n    x: int = 3\n"
        "hasattr(C, '__wrapped__'), repr(C), dir(C), issubclass(C, fg.HFConfig)\n"
        "spec = fg.ModelSpec(('A',), C, len, fg.DECODER_WEIGHTS)\n"
        "print('pydantic' in sys.modules, end=' ')\n"
        "C.model_fields\nprint('pydantic' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
