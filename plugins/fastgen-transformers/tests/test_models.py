"""What no plugin claims gives the tokens of transformers' ``generate``: batched, in pieces, from the prefix cache."""

from __future__ import annotations

import pytest
from fastgen_transformers.verified import table
from survey import try_model

# Norm without weights and clipped queries; parallel block with local and global layers; experts that files hold one by
# one; interleaved rope on part of a head; one key for all queries; latent attention, whose values are narrower.
FEW = ["olmo", "cohere2", "olmoe", "gptj", "gpt_bigcode", "youtu"]
MANY = [
    "afmoe", "apertus", "arcee", "aria_text", "biogpt", "bitnet", "codegen", "cohere", "cwm", "diffllama", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "granitemoe", "granitemoeshared",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "jais2", "minicpm3", "ministral", "nanochat", "nemotron",
    "persimmon", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
]  # fmt: skip


@pytest.mark.parametrize("model_type", FEW)
def test_matches_generate(model_type, tmp_path):
    row = try_model(model_type, tmp_path)
    assert (row.verdict, row.reason) == ("matches", "")


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", MANY)
def test_many_match_generate(model_type, tmp_path):
    row = try_model(model_type, tmp_path)
    assert (row.verdict, row.reason) == ("matches", "")


def test_the_shipped_table_says_so():
    verdicts = {row["model_type"]: (row["verdict"], row["reason"]) for row in table()["rows"]}
    assert all(verdicts[model_type] == ("matches", "") for model_type in (*FEW, *MANY))
    assert "differs" not in {verdict for verdict, _ in verdicts.values()}
