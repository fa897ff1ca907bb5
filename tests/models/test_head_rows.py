"""A18: a head with more rows than the tokenizer has ids, and ids with holes between them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fastgen.core.engine import Engine
from fastgen.testing.tokenizers import save_tokenizer
from fastgen.types import SamplingParams

END, ADDED, PADDING = 53, 60, 70


@pytest.fixture
def saved(save):
    """72 rows; ids 0 to 49, the added 50 to 53, and 60; 53 ends an answer. The family's head has biases to push."""
    saved = save(model_type="phi", vocab_size=72)
    vocabulary = {chr(ord("!") + number): number for number in range(50)}
    vocabulary |= {"<a>": 50, "<b>": 51, "<c>": 52, "<end>": END, "<added>": ADDED}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<a>", "<b>", "<c>", "<end>", "<added>"])
    assert [tokenizer.token_to_id(text) for text in ("<a>", "<end>", "<added>")] == [50, END, ADDED]
    save_tokenizer(tokenizer, saved.directory, eos_token="<end>")
    return saved


def push(saved, **heights):
    tensors = saved.tensors
    for name, height in heights.items():
        tensors["lm_head.bias"][{"end": END, "added": ADDED, "padding": PADDING}[name]] = height
    saved.tensors = tensors


def answer(saved):
    with Engine.load(saved.directory, device="cpu", num_blocks=16, block_size=4) as engine:
        engine.add([5, 6, 7], SamplingParams(temperature=0.0, max_new_tokens=4))
        outputs = [output for _ in range(9) if engine.has_work for output in engine.step()]
    return [output.token_id for output in outputs], outputs[-1].finish_reason


def test_a18_rows_beyond_the_ids_are_never_chosen(saved):
    push(saved, padding=300.0, added=200.0)
    assert answer(saved) == ([ADDED] * 4, "length")


def test_a18_an_added_end_token_ends_the_answer(saved):
    push(saved, padding=300.0, end=200.0)
    assert answer(saved) == ([END], "stop")


def test_a18_the_padding_row_is_what_the_head_says(saved, prompt):
    """The control: without the tokenizer beside it, the row is an id like any other."""
    push(saved, padding=300.0)
    for file in saved.directory.glob("token*"):
        file.unlink()
    assert answer(saved) == ([PADDING] * 4, "length")


@pytest.mark.parametrize("model_type", ["llama", "opt", "falcon", "phi", "phi3", "gpt2", "gpt_neox", "stablelm"])
def test_a18_an_odd_number_of_rows(save, prompt, model_type):
    saved = save(model_type=model_type, vocab_size=51)
    ids = [token % 51 for token in prompt]
    assert (saved.logits(ids) - saved.expected(ids)).abs().max() < 1e-4
