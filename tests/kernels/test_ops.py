"""Who runs an operation, and why the others do not."""

from __future__ import annotations

import pytest

from fastgen.errors import ConfigError, PluginError
from fastgen.kernels.ops import OPERATIONS, Implementation, KernelTable, Need
from fastgen.kernels.reference import IMPLEMENTATIONS


def only_small(need: Need) -> str | None:
    return None if int(need.sizes["size"]) <= 8 else f"size {need.sizes['size']} is above 8"


def fast(*_: object) -> str:
    return "fast"


FAST = Implementation("add_rms_norm", "fast", fast, only_small, rank=20)


def test_every_operation_has_a_reference_for_any_device():
    table = KernelTable("cpu", "float32", IMPLEMENTATIONS)
    assert all(callable(table.choose(operation, size=1)) for operation in OPERATIONS)


def test_highest_rank_that_supports_the_need_wins():
    table = KernelTable("cpu", "float32", [*IMPLEMENTATIONS, FAST])
    assert table.choose("add_rms_norm", size=8) is fast
    assert table.choose("add_rms_norm", size=9) is not fast
    small, large = table.choices
    assert (small.chosen, small.rejected) == ("fast", (("torch", "ranked below fast"),))
    assert (large.chosen, large.rejected) == ("torch", (("fast", "size 9 is above 8"),))


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"no kernel can run add_rms_norm.*fast: size 9 is above 8"):
        KernelTable("cpu", "float32", [FAST]).choose("add_rms_norm", size=9)


@pytest.mark.parametrize(
    ("implementations", "message"),
    [
        ([Implementation("add_rms_nrom", "x", fast)], "unknown operation 'add_rms_nrom'. Did you mean 'add_rms_norm'"),
        ([FAST, FAST], "two kernels of the name 'fast'"),
    ],
)
def test_bad_registrations(implementations, message):
    with pytest.raises(PluginError, match=message):
        KernelTable("cpu", "float32", implementations)
