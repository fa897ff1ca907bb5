"""Chat templates: transformers' sandbox, and errors in the template's own words."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fastgen.errors import InvalidRequestError
from fastgen.testing.tokenizers import build_byte_tokenizer, byte_tokenizer, save_tokenizer
from fastgen.text import Tokenizer, chat

USER = [{"role": "user", "content": "hi"}]


def refusal(tokenizer: Tokenizer, messages: Any = USER, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(messages, **options)
    return caught.value


TEMPLATES = [
    "{{ strftime_now('%Y-%m') }}",
    "{% if messages %}\n    {% for m in messages %}\n{{ m.role }}\n    {% endfor %}\n{% endif %}",
    "{{ {'a': '<b>&\\'é'} | tojson }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{{ tools | tojson(indent=1) if tools else 'none' }}{{ bos_token }}{{ enable_thinking | default('unset') }}",
    "{{ messages[0].content is none }}{{ messages[0].content is defined }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_b7_renders_as_transformers_does(plain: Tokenizer, template: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<x>"}}]
    messages = [{"role": "user", "content": None}, {"role": "assistant", "content": "ok"}]
    options: dict[str, Any] = {"tools": tools, "enable_thinking": False, "add_generation_prompt": True}
    theirs = plain._hf.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert plain.render_chat(messages, template=template, **options) == theirs


def test_b7_what_the_environment_offers(plain: Tokenizer) -> None:
    assert plain.render_chat(USER, template=TEMPLATES[0]) == datetime.now().strftime("%Y-%m")
    assert plain.render_chat(USER, template=TEMPLATES[1]) == "user\n"
    assert plain.render_chat(USER, template=TEMPLATES[2]) == '{"a": "<b>&\'é"}'
    assert plain.render_chat(USER, template=TEMPLATES[3]) == ""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only user and assistant, please') }}", "only user and assistant, please"),
        ("{{ messages[0].nope.more }}", "has no attribute 'nope'"),
        ("{{ 'x' + none }}", "can only concatenate str"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_b7_template_errors_in_its_own_words(plain: Tokenizer, template: str, words: str) -> None:
    error = refusal(plain, template=template)
    assert words in str(error)
    assert error.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ messages.__init__ }}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_b7_python_internals_do_not_show(plain: Tokenizer, template: str) -> None:
    try:
        shown = plain.render_chat(USER, template=template)
    except InvalidRequestError as error:
        shown = str(error)
        assert "unsafe" in shown
    else:
        assert shown == ""
    assert "<class" not in shown


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"])
def test_b7_python_internals_lead_nowhere(plain: Tokenizer, template: str) -> None:
    assert "is unsafe" in str(refusal(plain, template=template))


def test_b7_a_huge_range_is_refused_at_once(plain: Tokenizer) -> None:
    assert "Range too big" in str(refusal(plain, template="{% for i in range(1000000000) %}{% endfor %}"))


def test_b7_a_loop_without_end_is_stopped(plain: Tokenizer) -> None:
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.2 s"):
        chat.render(plain._hf, USER, template=template, seconds=0.2)
    assert time.perf_counter() - start < 30


def test_b7_the_time_limit_never_strikes_late(plain: Tokenizer) -> None:
    """Limits around the time a render takes: each ends in text or in the error, and nothing comes after."""
    for turn in range(100):
        with contextlib.suppress(InvalidRequestError):
            assert chat.render(plain._hf, USER, seconds=turn * 2e-5)
        assert sum(range(2000)) == 1999000


def test_b7_the_time_limit_leaves_nothing_behind_in_the_interpreter(plain: Tokenizer) -> None:
    """CPython 3.11 goes on to look for an exception that was taken back, at every call, and hangs under a profiler."""
    plain.render_chat(USER)
    for turn in range(20):
        with contextlib.suppress(InvalidRequestError):
            chat.render(plain._hf, USER, seconds=turn * 1e-4)
    finished = threading.Event()

    def profiled() -> None:
        sys.setprofile(lambda frame, kind, argument: None)
        list(map(str.upper, "once"))
        called_by_python()
        sys.setprofile(None)
        finished.set()

    def called_by_python() -> None: ...

    threading.Thread(target=profiled, daemon=True).start()
    assert finished.wait(30)


def test_b7_generation_prompt_and_continuation_exclude_each_other(plain: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure, "}]
    assert plain.render_chat(messages).endswith("<eos>[assistant]")
    assert plain.render_chat(messages, add_generation_prompt=False).endswith("Sure, <eos>")
    assert plain.render_chat(messages, continue_final_message=True).endswith("[assistant]Sure, ")
    error = refusal(plain, messages, continue_final_message=True, add_generation_prompt=True)
    assert "choose one" in str(error)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("hi", "list of dicts"),
        ({"role": "user", "content": "hi"}, "list of dicts"),
        (None, "list of dicts"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([*USER, {"content": "hi"}], r"messages\[1\] needs a 'role'"),
        ([{"role": 5, "content": "hi"}], r"needs a 'role'"),
        ([{"role": "user", "content": 5}], r"\['content'\] must be a string"),
    ],
)
def test_messages_are_checked(plain: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        plain.render_chat(messages)
    assert caught.value.field == "messages"


def test_the_callers_messages_are_not_changed(plain: Tokenizer) -> None:
    messages = [{"role": "user", "content": None, "x": [1]}, {"role": "assistant", "content": "a"}]
    plain.render_chat(messages, continue_final_message=True, template="{{ messages[1].content }}")
    assert messages == [{"role": "user", "content": None, "x": [1]}, {"role": "assistant", "content": "a"}]


def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    assert "has no chat template" in str(refusal(tokenizer))
    assert tokenizer.render_chat(USER, template="{{ messages[0].content }}!") == "hi!"


def test_b7_named_templates(tmp_path: Path) -> None:
    templates = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R{{ 1 }}"}
    tokenizer = Tokenizer.load(byte_tokenizer(tmp_path, chat_template=templates))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER) == "Dhi"
    assert tokenizer.render_chat(USER, tools=[{"name": "f"}]) == "T1"
    assert tokenizer.render_chat(USER, template="rag") == "R1"
    error = refusal(tokenizer, template="rga")
    assert "Did you mean 'rag'?" in str(error)
    assert error.field == "template"


def test_b7_template_in_the_config_as_string_or_list(tmp_path: Path) -> None:
    """Older checkpoints keep the template in tokenizer_config.json, as text or as a list of named ones."""
    directory = save_tokenizer(build_byte_tokenizer(), tmp_path)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for value in ["C{{ messages[0].content }}", [{"name": "default", "template": "C{{ messages[0].content }}"}]]:
        path.write_text(json.dumps(config | {"chat_template": value}))
        assert Tokenizer.load(directory).render_chat(USER) == "Chi"
    (directory / "chat_template.jinja").write_text("F{{ messages[0].content }}")
    assert Tokenizer.load(directory).render_chat(USER) == "Fhi"


def test_arguments_that_are_no_template_variables_are_refused(plain: Tokenizer) -> None:
    assert "'tokenize' cannot be a template variable" in str(refusal(plain, tokenize=True))


@pytest.mark.real_model
def test_real_template(real_model: Path) -> None:
    ours, theirs = Tokenizer.load(real_model), AutoTokenizer.from_pretrained(real_model)
    messages = [*USER, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "é😀"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == expected
    assert ours.render_chat(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
