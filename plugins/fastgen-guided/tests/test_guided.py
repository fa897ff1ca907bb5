"""Every answer that the processor lets through satisfies its constraint, by judges who know nothing of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
from fastgen_guided.processor import guided

from fastgen.text import Tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "é"]}, "maxItems": 2},
        "boss": {"anyOf": [{"$ref": "#/$defs/boss"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"boss": {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"}}}},
}
SCHEMAS: dict[str, Any] = {
    "object": PERSON,
    "recursive": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    "enum": {"enum": [1, "one", None, {"one": 1}, [1]]},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    "format, which only annotates": {"type": "string", "format": "path", "maxLength": 3},
    "date": {"type": "string", "format": "date"},
}


def make(words: Tokenizer, options: Any, **changes: Any) -> Any:
    """A processor as the engine makes it."""
    given: dict[str, Any] = {"vocab_size": words.num_ids, "prompt_token_ids": [1], "tokenizer": words}
    given |= {"stop_token_ids": words.eos_token_ids, "checked": False}
    return guided(options, **{**given, **changes})


def walk(tokenizer: Tokenizer, processor: Callable[..., torch.Tensor], seed: int, most: int = 400) -> list[int] | None:
    """A random answer, without its end; ``None`` if it did not end within ``most`` tokens. It ends when it may, half
    the time, and leans towards the tokens that close things, so that most answers end."""
    rng = random.Random(seed)
    ends = tokenizer.eos_token_ids
    answer: list[int] = []
    closing = {token for token in range(tokenizer.num_ids) if set(tokenizer.token_text(token)) & set('"}],')}
    while len(answer) < most:
        scores = processor(answer, torch.zeros(tokenizer.num_ids))
        allowed = scores.isfinite().nonzero().flatten().tolist()
        assert allowed, "no token is left"
        if any(token in ends for token in allowed) and (len(allowed) == 1 or rng.random() < 0.5):
            return answer
        others = [token for token in allowed if token not in ends]
        good = [token for token in others if token in closing]
        answer.append(rng.choice(good if good and rng.random() < 0.4 else others))
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_satisfy_their_schema(tokenizer: Tokenizer, name: str) -> None:
    schema = SCHEMAS[name]
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    ended = 0
    for seed in range(12):
        answer = walk(tokenizer, make(tokenizer, {"json_schema": schema}), seed)
        if answer is not None:
            ended += 1
            judge.validate(json.loads(tokenizer.decode(answer)))
    assert ended > 3


def test_without_the_processor_they_do_not(tokenizer: Tokenizer) -> None:
    def free(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits

    satisfied = 0
    for seed in range(12):
        answer = walk(tokenizer, free, seed)
        try:
            jsonschema.validate(json.loads(tokenizer.decode(answer or [])), PERSON)
            satisfied += 1
        except (ValueError, jsonschema.ValidationError):
            pass
    assert satisfied == 0


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "format, which only annotates"])
def test_what_satisfies_the_schema_may_be_said(plain: Tokenizer, name: str) -> None:
    """And ends there."""
    answers = {
        "object": ['{"name": "Ann", "age": 42}', '{"name":"é","age":0,"tags":["b\\n"],"boss":{"id":"AB3"}}'],
        "recursive": ['{"next":{"next":null}}'],
        "number": ["-1.5", "0", "1.99"],
        "enum": ['"one"', "null", '{"one":1}'],
        "tuple": ['[true,"x"]'],
        "date": ['"2024-02-29"'],
    }[name]
    for text in answers:
        processor = make(plain, {"json_schema": SCHEMAS[name]})
        said: list[int] = []
        for byte in text.encode():
            assert processor(said, torch.zeros(plain.num_ids))[byte] == 0, text[: len(said)]
            said.append(byte)
        assert processor(said, torch.zeros(plain.num_ids))[257] == 0


@pytest.mark.parametrize("whitespace", [True, False])
def test_any_object(tokenizer: Tokenizer, whitespace: bool) -> None:
    answers = [walk(tokenizer, make(tokenizer, {"json_object": True, "whitespace": whitespace}), i) for i in range(8)]
    texts = [tokenizer.decode(answer) for answer in answers if answer is not None]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)
    if not whitespace:
        strings = r'"([^"\\]|\\.)*"'
        assert not any(re.search(r"\s", re.sub(strings, "", text)) for text in texts)


@pytest.mark.parametrize("regex", ["[a-c]{2,5}(é|東京)?", r"^\d{3}-\d{4}$", "(yes|no) / maybe", "a\\$", "x\ny"])
def test_a_regular_expression(tokenizer: Tokenizer, regex: str) -> None:
    texts = [tokenizer.decode(walk(tokenizer, make(tokenizer, {"regex": regex}), seed) or []) for seed in range(8)]
    assert all(re.fullmatch(regex, text) for text in texts), texts


def test_a_choice(tokenizer: Tokenizer) -> None:
    choice = ["yes", "yes and no", 'a "b"\n', "é東京😀"]
    texts = {tokenizer.decode(walk(tokenizer, make(tokenizer, {"choice": choice}), seed) or []) for seed in range(40)}
    assert texts <= set(choice)
    assert len(texts) > 2


@pytest.mark.parametrize("grammar", ['start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'], ids=["lark", "gbnf"])
def test_a_grammar(tokenizer: Tokenizer, grammar: str) -> None:
    for seed in range(8):
        text = tokenizer.decode(walk(tokenizer, make(tokenizer, {"grammar": grammar}), seed) or [])
        assert re.fullmatch(r"\(*x\)*", text)
        assert text.count("(") == text.count(")")


def test_a_structure(plain: Tokenizer) -> None:
    call = {"sequence": ['{"name": "f", "arguments": ', {"json_schema": PERSON}, "}"]}
    structure = {"sequence": [{"token": 256}, {"repeat": call, "separator": "\n", "most": 2}, {"any_of": ["!", "?"]}]}
    counts = set()
    for seed in range(12):
        answer = walk(plain, make(plain, {"structure": structure}), seed)
        if answer is None:
            continue
        assert answer[0] == 256
        text = plain.decode(answer)
        assert text[-1] in "!?"
        calls = [json.loads(line) for line in re.split(r"\n(?=\{\"name)", text[:-1])]
        for one in calls:
            jsonschema.validate(one["arguments"], PERSON)
        counts.add(len(calls))
    assert counts == {1, 2}


def test_a_space_at_the_start_that_the_tokenizer_leaves_out(tokenizer: Tokenizer) -> None:
    texts = {tokenizer.decode(walk(tokenizer, make(tokenizer, {"regex": " ?yes"}), seed) or []) for seed in range(20)}
    spaced = [token for token in range(tokenizer.num_ids) if (tokenizer.token_bytes(token) or b"").startswith(b" ")]
    assert texts == ({"yes", " yes"} if tokenizer.decode(spaced[:1]).startswith(" ") else {"yes"})


# ---- where an answer may end -----------------------------------------------------------------------------------------


def test_it_ends_exactly_where_the_grammar_may(plain: Tokenizer) -> None:
    processor = make(plain, {"regex": "ab(c)?"}, stop_token_ids=frozenset([257, 258, ord("z")]))
    may_end = {"": False, "a": False, "ab": True, "abc": True}
    for text, expected in may_end.items():
        scores = processor(list(text.encode()), torch.zeros(plain.num_ids))
        assert [bool(scores[end] == 0) for end in (257, 258, ord("z"))] == [expected] * 3, text
    assert processor(list(b"abc"), torch.zeros(plain.num_ids)).isfinite().sum() == 3


def test_a_stop_id_with_a_text_does_not_cut_the_grammar_short(plain: Tokenizer) -> None:
    processor = make(plain, {"regex": "[a-z]{3}"}, stop_token_ids=frozenset([257, ord("z")]))
    assert processor([], torch.zeros(plain.num_ids))[ord("z")] == float("-inf")
    assert processor(list(b"abc"), torch.zeros(plain.num_ids))[ord("z")] == 0


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_is_a_function_of_the_tokens(plain: Tokenizer) -> None:
    """Whatever it was asked before, in any order, as drafts that are taken back would."""
    wanderer = make(plain, {"json_schema": PERSON})
    texts = [
        b'{"name": "Ann"',
        b"",
        b'{"name": "A',
        b'{"age"',
        b'{"name": "Ann", "age": 4',
        b'{"name": "Bob", "age": 4',
    ]
    for text in [*texts, *reversed(texts)]:
        try:
            seen = wanderer(list(text), torch.zeros(plain.num_ids))
        except ValueError:
            with pytest.raises(ValueError, match="follow"):
                make(plain, {"json_schema": PERSON})(list(text), torch.zeros(plain.num_ids))
            wanderer = make(plain, {"json_schema": PERSON})
            continue
        fresh = make(plain, {"json_schema": PERSON})(list(text), torch.zeros(plain.num_ids))
        assert torch.equal(seen, fresh), text
        assert torch.equal(seen, wanderer(list(text), torch.zeros(plain.num_ids)))  # asked twice


def test_choices_do_not_share_state(plain: Tokenizer) -> None:
    one, other = (make(plain, {"regex": "(ab|cd)"}) for _ in range(2))
    one(list(b"a"), torch.zeros(plain.num_ids))
    assert other([], torch.zeros(plain.num_ids)).isfinite().nonzero().flatten().tolist() == [ord("a"), ord("c")]


def test_logits_of_what_may_come_are_left_as_they_are(plain: Tokenizer) -> None:
    logits = torch.randn(plain.num_ids)
    scores = make(plain, {"regex": "[ab]"})([], logits.clone())
    assert torch.equal(scores[[97, 98]], logits[[97, 98]])
    assert scores.isfinite().sum() == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_without(plain: Tokenizer) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        make(plain, {"regex": "a"}, tokenizer=None)
    with pytest.raises(ValueError, match="ignore_eos"):
        make(plain, {"regex": "a"}, stop_token_ids=frozenset())
    with pytest.raises(ValueError, match="Token range"):
        make(plain, {"structure": {"token": 5000}})


def test_an_answer_that_does_not_follow(plain: Tokenizer) -> None:
    with pytest.raises(ValueError, match="token 99 of the answer does not follow"):
        make(plain, {"regex": "ab"})(list(b"ac"), torch.zeros(plain.num_ids))
