"""Numbers that stand both in Python and in the library's sources are the same."""

from __future__ import annotations

import re

import pytest

from fastgen.kernels import kv_int8
from fastgen.kernels.cpu import attention
from fastgen.kernels.cpu.build import SOURCES
from fastgen.kernels.quantisation import GROUPS


def constant(header: str, name: str) -> int:
    """The one value that a header gives to a ``constexpr``."""
    declaration = rf"^constexpr \w+ (?:\w+ = \d+, )*{name} = (\d+)[,;]"
    (value,) = re.findall(declaration, (SOURCES / header).read_text(), re.MULTILINE)
    return int(value)


@pytest.mark.parametrize(
    ("header", "name", "in_python"),
    [
        ("attention_codes.h", "kKeyGroup", kv_int8.KEY_GROUP),
        ("attention_codes.h", "kValueGroup", kv_int8.VALUE_GROUP),
        ("attention_codes.h", "kCodes", kv_int8._MOST),
        ("attention.h", "kSlack", attention._SLACK),
        ("quant.h", "kGroup8", GROUPS["int8"]),
        ("quant.h", "kGroup4", GROUPS["int4"]),
    ],
)
def test_constants_agree(header, name, in_python):
    assert constant(header, name) == in_python


def test_a_constant_that_is_gone_is_noticed():
    with pytest.raises(ValueError, match="not enough values"):
        constant("attention.h", "kKeyGroup")
