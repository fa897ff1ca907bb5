"""Flags made from the fields of EngineConfig and SamplingParams, and a TOML file under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fastgen.cli.options import SectionedCommand, engine_options, sampling_options
from fastgen.config import EngineConfig
from fastgen.types import SamplingParams


def parse(*arguments: str) -> tuple[EngineConfig, SamplingParams]:
    got: dict[str, Any] = {}

    @click.command(cls=SectionedCommand)
    @click.argument("word")
    @engine_options
    @sampling_options
    def command(word: str, config: EngineConfig, params: SamplingParams) -> None:
        got.update(config=config, params=params, word=word)

    result = CliRunner().invoke(command, ["word", *arguments])
    if result.exit_code:
        raise click.UsageError(f"exit {result.exit_code}: {result.output}")
    assert got["word"] == "word"
    return got["config"], got["params"]


def test_nothing_given_is_the_defaults_and_nothing_set() -> None:
    config, params = parse()
    assert (config, params) == (EngineConfig(), SamplingParams())
    assert not config.model_fields_set
    assert not params.model_fields_set


ENGINE_FLAGS = {
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "device": (["--device", "cpu"], "cpu"),
    "threads": (["--threads", "2"], 2),
    "quantization": (["--quantization", "int8"], "int8"),
    "packed_cache": (["--no-packed-cache"], False),
    "max_batch_tokens": (["--max-batch-tokens", "64"], 64),
    "target_latency": (["--target-latency", "50"], 50.0),
    "max_sequences": (["--max-sequences", "3"], 3),
    "max_model_len": (["--max-model-len", "99"], 99),
    "block_size": (["--block-size", "8"], 8),
    "num_blocks": (["--num-blocks", "10"], 10),
    "cache_memory": (["--cache-memory", "0.25"], 0.25),
    "prefix_caching": (["--no-prefix-caching"], False),
    "kv_dtype": (["--kv-dtype", "int8"], "int8"),
    "record_passes": (["--no-record-passes"], False),
    "policy": (["--policy", "prefill-first"], "prefill-first"),
    "queue_order": (["--queue-order", "lpm"], "lpm"),
    "seed": (["--seed", "7"], 7),
    "revision": (["--revision", "v1"], "v1"),
    "token": (["--token", "secret"], "secret"),
    "offline": (["--offline"], True),
    "trust_remote_code": (["--trust-remote-code"], True),
    "load_bin": (["--load-bin"], True),
    "adapter": (["--adapter", "A=one", "--adapter", "B=two"], {"A": "one", "B": "two"}),
    "lora": (["--lora", "sql=a/b", "--lora", "chat=c=d"], {"sql": "a/b", "chat": "c=d"}),
}
SAMPLING_FLAGS = {
    "n": (["--n", "2"], 2),
    "max_new_tokens": (["--max-new-tokens", "5"], 5),
    "max_length": (["--max-length", "50"], 50),
    "min_new_tokens": (["--min-new-tokens", "1"], 1),
    "temperature": (["--temperature", "0"], 0.0),
    "top_k": (["--top-k", "-1"], -1),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", "5=-2.5", "--logit-bias", "6=1"], {5: -2.5, 6: 1.0}),
    "stop": (["--stop", "\n", "--stop", "a,b"], ("\n", "a,b")),
    "stop_token_ids": (["--stop-token-ids", "1,2", "--stop-token-ids", "3"], (1, 2, 3)),
    "include_stop": (["--include-stop"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "add_special_tokens": (["--no-add-special-tokens"], False),
    "logprobs": (["--logprobs", "3"], 3),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "logits_processors": (
        ["--logits-processors", "a", "--logits-processors", 'b={"k": [1]}'],
        {"a": {}, "b": {"k": [1]}},
    ),
    "priority": (["--priority", "-3"], -3),
    "cache_salt": (["--cache-salt", "s"], "s"),
    "lora": (["--use-lora", "sql"], "sql"),
}


def test_every_field_has_a_flag() -> None:
    assert set(ENGINE_FLAGS) == set(EngineConfig.model_fields)
    assert set(SAMPLING_FLAGS) | {"seed"} == set(SamplingParams.model_fields)


@pytest.mark.parametrize("field", ENGINE_FLAGS)
def test_engine_flag(field: str) -> None:
    flags, value = ENGINE_FLAGS[field]
    config, params = parse(*flags)
    assert getattr(config, field) == value
    assert config.model_fields_set == {field}
    assert not params.model_fields_set


@pytest.mark.parametrize("field", SAMPLING_FLAGS)
def test_sampling_flag(field: str) -> None:
    flags, value = SAMPLING_FLAGS[field]
    config, params = parse(*flags)
    assert getattr(params, field) == value
    assert params.model_fields_set == {field}
    assert not config.model_fields_set


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "nan"], "temperature: "),
        (["--temperature", "-1"], "temperature: "),
        (["--temperature", "hot"], "not a valid float"),
        (["--max-new-tokens", "0"], "max_new_tokens: "),
        (["--max-new-tokens", "5", "--max-length", "9"], "not both"),
        (["--stop", ""], "empty stop string"),
        (["--stop-token-ids", "1,x"], "must be integers"),
        (["--logit-bias", "5"], "write it as KEY=VALUE"),
        (["--logit-bias", "x=1"], "invalid literal"),
        (["--logit-bias", "5=nan"], "bias of token 5"),
        (["--logits-processors", "a={"], "'a={'"),
        (["--dtype", "int4"], "'int4' is not one of"),
        (["--quantization", "int3"], "'int3' is not one of 'int8', 'int4'"),
        (["--block-size", "0"], "block_size: "),
        (["--num-blocks", "4", "--cache-memory", "1GiB"], "not both"),
        (["--cache-memory", "lots"], "not a size"),
        (["--max-batch-token", "4"], "Did you mean"),
    ],
)
def test_wrong_value_is_a_usage_error(flags: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match="exit 2") as caught:
        parse(*flags)
    assert message in str(caught.value)


def write(path: Path, text: str) -> str:
    file = path / "fastgen.toml"
    file.write_text(text)
    return str(file)


def test_flags_go_over_toml(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        block_size = 8
        max_sequences = 5
        [adapter]
        A = "one"
        B = "two"
        [sampling]
        temperature = 0.5
        top_k = 3
        stop = ["x"]
        """,
    )
    config, params = parse("--config", file, "--max-sequences", "9", "--adapter", "B=three", "--top-k", "4")
    assert (config.block_size, config.max_sequences, config.adapter) == (8, 9, {"A": "one", "B": "three"})
    assert (params.temperature, params.top_k, params.stop) == (0.5, 4, ("x",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block_sise = 8", "option 'block_sise'. Did you mean 'block_size'"),
        ("block_size = 'many'", "block_size: "),
        ("[sampling]\ntemprature = 1.0", "unknown option 'temprature'. Did you mean 'temperature'"),
        ("sampling = 3", "must be a table"),
        ("block_size = ", "not valid TOML"),
        ("block_sise = 8", "fastgen.toml: "),
        ("port = 8000", "port is a server's option; it belongs under [server]"),
        ("[sever]\nport = 8000", "unknown table [sever]. Did you mean 'server'"),
    ],
)
def test_wrong_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(click.UsageError, match="exit 2") as caught:
        parse("--config", write(tmp_path, text))
    assert message in str(caught.value)


def test_help_is_in_sections_with_defaults() -> None:
    @click.command(cls=SectionedCommand)
    @engine_options
    @sampling_options
    def command(config: EngineConfig, params: SamplingParams) -> None: ...

    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert "Options: --help" in shown
    assert shown.index("Options: --help") < shown.index("Engine options: --config") < shown.index("Sampling options: ")
    assert "--block-size INTEGER Tokens in one block of the KV cache. [16]" in shown
    assert "--prefix-caching / --no-prefix-caching" in shown
