"""Keys and values in 8 bits: what a request is answered does not depend on how its work was cut and shared, the cache
holds more, and a kernel that cannot is found out before weights are read."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import fastgen
from fastgen.cli import main
from fastgen.config import EngineConfig
from fastgen.core.blueprint import draw
from fastgen.core.layers.attention import CachedAttention
from fastgen.errors import ConfigError
from fastgen.kernels import cpu, reference
from fastgen.kernels.ops import Implementation, KernelTable, Need
from fastgen.testing.checkpoints import tiny_llama

SHARED = "The quick brown fox jumps over the lazy"
REQUESTS = [
    ("Hello, my name is", {"temperature": 0.0}),
    (f"{SHARED} dog", {"temperature": 0.0}),
    (f"{SHARED} cat", {"seed": 2, "temperature": 0.8, "top_k": 40}),
    ("x" * 70, {"seed": 5, "temperature": 1.0}),
    ("to be or not to be", {"seed": 3, "temperature": 1.5}),
]
CIRCUMSTANCES = {
    "batched": {},
    "one token a pass": {"max_batch_tokens": 1},
    "pieces of 3": {"max_batch_tokens": 3},
    "preempted": {"num_blocks": 30},
    "preempted, no prefix cache": {"num_blocks": 30, "prefix_caching": False},
    "no prefix cache": {"prefix_caching": False},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def kernel(request):
    """The library's attention, and the reference."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(cpu, "IMPLEMENTATIONS", ())
        yield request.param


def load(directory, **options) -> fastgen.Pipeline:
    settings = {"device": "cpu", "block_size": 4, "num_blocks": 512, "seed": 0, "kv_dtype": "int8", **options}
    return fastgen.pipeline(directory, **settings)


def answers(pipe: fastgen.Pipeline, *, together: bool) -> list[list[int]]:
    options = [{"max_new_tokens": 24, "ignore_eos": True, **o} for _, o in REQUESTS]
    if together:
        streams = [pipe.stream(text, **o) for (text, _), o in zip(REQUESTS, options, strict=True)]
        responses = [stream.response() for stream in streams if list(stream)]
    else:
        responses = [pipe(text, **o) for (text, _), o in zip(REQUESTS, options, strict=True)]
    return [response.choices[0].token_ids for response in responses]


@pytest.fixture(scope="module")
def alone(directory, kernel):
    with load(directory, prefix_caching=False) as pipe:
        assert [c.chosen for c in pipe.engine.blueprint.kernels.choices if c.need.sizes.get("kv_dtype")] == [kernel]
        return answers(pipe, together=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", CIRCUMSTANCES.values(), ids=CIRCUMSTANCES)
def test_the_same_however_the_work_is_cut(directory, kernel, alone, options):
    with load(directory, **options) as pipe:
        assert answers(pipe, together=True) == alone
        assert (pipe.stats().preemptions > 0) == (options.get("num_blocks") == 30)


@pytest.mark.slow
def test_prefix_hit(directory, kernel, alone):
    with load(directory) as pipe:
        assert [answers(pipe, together=False) for _ in range(2)] == [alone, alone]
        assert pipe.stats().prefix_hit_tokens > 0


def test_it_is_in_8_bits(directory):
    """A control: log-probabilities are near those of the model's dtype, and not the same."""
    found = []
    for kv_dtype in ("auto", "int8"):
        with load(directory, kv_dtype=kv_dtype) as pipe:
            response = pipe("The quick brown fox", max_new_tokens=1, prompt_logprobs=0, temperature=0.0)
            found.append([one.logprob for one in response.prompt_logprobs[1:]])
    differences = [abs(one - other) for one, other in zip(*found, strict=True)]
    assert 0 < max(differences) < 0.2


@pytest.mark.parametrize(("dtype", "times"), [("float32", 3.5), ("bfloat16", 1.8)])
def test_more_tokens_fit(tmp_path, dtype, times):
    directory = tiny_llama(tmp_path, tokenizer=False, head_dim=64)
    options = {"device": "cpu", "dtype": dtype, "cache_memory": "1MB", "max_sequences": 60000}
    kept, short = (draw(directory, EngineConfig.of({**options, "kv_dtype": one})).cache for one in ("auto", "int8"))
    assert short.tokens > times * kept.tokens
    assert (kept.reason, short.reason) == ("cache_memory 1MB", "cache_memory 1MB; keys and values in int8")


def test_explain_says_it(directory):
    shown = CliRunner().invoke(main, ["explain", str(directory), "--json", "--num-blocks", "7", "--kv-dtype", "int8"])
    facts = json.loads(shown.stdout)
    assert facts["memory"]["cache"].endswith("(num_blocks as asked; keys and values in int8)")
    (attention,) = (one for one in facts["kernels"] if one["operation"] == "paged_attention")
    assert "kv_dtype int8" in attention["sizes"]


def test_an_unknown_format():
    with pytest.raises(ConfigError, match=r"kv_dtype.*int4"):
        EngineConfig.of({"kv_dtype": "int4"})


class Plain:
    """A kernel of somebody else's, which has never heard of other formats."""


class TestKernelsOfOthers:
    def bind(self, *kernels, kv_dtype="int8"):
        table = KernelTable("cpu", "float32", [*kernels, *reference.IMPLEMENTATIONS], kv_dtype=kv_dtype)
        attention = CachedAttention(4, 2, 16)
        attention.bind(table)
        return attention, table

    def test_one_that_has_never_heard_of_it(self):
        mine = Implementation("paged_attention", "plain", Plain)
        attention, _ = self.bind(mine, kv_dtype="auto")
        assert isinstance(attention.kernel, Plain)
        attention, table = self.bind(mine)
        assert table.choices[-1].chosen == "torch"
        assert dict(table.choices[-1].rejected)["plain"] == "cannot keep keys and values in int8 (it knows: auto)"
        assert attention.cache_spec.kv_dtype == "int8"
        alone = KernelTable("cpu", "float32", [mine], kv_dtype="int8")
        with pytest.raises(ConfigError, match=r"no kernel can run paged_attention .*plain: cannot keep .* in int8"):
            CachedAttention(4, 2, 16).bind(alone)

    def test_one_that_declines(self):
        def supports(need: Need) -> str | None:
            return "keeps the model's dtype" if "kv_dtype" in need.sizes else None

        attention, table = self.bind(Implementation("paged_attention", "plain", Plain, supports))
        assert table.choices[-1].chosen == "torch"
        assert attention.cache_spec.kv_dtype == "int8"

    def test_the_need_of_the_default_is_as_it_was(self):
        _, table = self.bind(kv_dtype="auto")
        assert "kv_dtype" not in table.choices[-1].need.sizes
