"""What ``fastgen models`` says of our own families is what the kit found: `make conformance` writes it."""

from __future__ import annotations

import fastgen
from fastgen.core.plugin import registry
from fastgen.core.plugin.conformance import read_conformance
from fastgen.core.plugin.loader import normalise

# The same adapters under names that transformers has no text class for; their own tests read them.
BY_ANOTHER_NAME = {"Gemma3ForConditionalGeneration", "RWForCausalLM", "StableLMEpochForCausalLM"}
OURS = {"fastgen", "fastgen-exaone4", "fastgen-deepseek"}


def test_every_family_of_ours_has_passed():
    served = [row for row in registry().model_rows() if normalise(row.plugin.distribution) in OURS]
    assert len(served) > 25
    untested = set()
    for row in served:
        found = read_conformance(row.plugin.entry)
        assert found is not None, f"{row.plugin.entry}: run `make conformance`"
        assert found.passed, found.summary()
        assert found.complete
        assert found.faults[0] == found.faults[1] > 20
        assert found.fastgen == fastgen.__version__
        if row.architecture not in found.architectures:
            untested.add(row.architecture)
    assert untested == BY_ANOTHER_NAME
