"""The page in a browser: the chat."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.thorough


def test_a_chat_turn_streams(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    model.say = "One, two, three. Done at last."
    model.hold()
    page = visit()
    ask(page, "Count.")
    model.let(9)
    expect(answered(page)).to_have_text("One, two,")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    model.release()
    expect(answered(page)).to_have_text(model.say)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message.assistant small")).to_contain_text("31 tokens")
    ask(page, "Again.")
    expect(page.locator(".message")).to_have_count(4)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert "[user]Count." in model.prompts[-1]
    assert model.say in model.prompts[-1]


def test_stop_ends_it_at_the_server_too(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    model.say = "word " * 300
    model.hold()
    page = visit()
    ask(page, "Talk.")
    model.let(20)
    expect(answered(page)).to_contain_text("word word")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant small")).to_have_text("stopped")
    model.release()
    deadline = time.monotonic() + 20
    while not model.engine.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert model.engine.aborted
    expect(answered(page)).to_contain_text("word word")
    model.say = "Other."
    page.get_by_role("button", name="Regenerate").click()
    expect(answered(page)).to_have_text("Other.")
    expect(page.locator(".message")).to_have_count(2)


def test_reload_keeps_the_conversation_and_the_settings(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    model.say = "Kept.\n\n```python\nprint(1)\n```"
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Model", exact=True).select_option("other name")
    page.get_by_label("Appearance").select_option("dark")
    page.get_by_role("button", name="Done").click()
    ask(page, "Remember this.")
    expect(answered(page)).to_contain_text("print(1)")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert "Be brief." in model.prompts[-1]
    page.reload()
    expect(page.locator(".message.user .body")).to_have_text("Remember this.")
    expect(page.locator(".message.assistant figure code")).to_have_text("print(1)")
    expect(page.locator("#model-name")).to_have_text("other name")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    page.get_by_role("button", name="Done").click()
    assert page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(page.get_by_text("Say something to the model.")).to_be_visible()


def test_a_reload_in_the_middle_keeps_what_had_come(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    model.say = "word " * 100
    model.hold()
    page = visit()
    ask(page, "Talk.")
    model.let(20)
    expect(answered(page)).to_contain_text("word word word")
    page.reload()
    expect(answered(page)).to_contain_text("word word word")
    model.release()


def test_settings_go_into_the_request(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    page = visit()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.method == "POST" else None)
    ask(page, "Plain.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    for name, value in {"Temperature": "0.7", "Top p": "0.9", "Most tokens": "4", "Seed": "5"}.items():
        page.get_by_label(name).fill(value)
    page.get_by_label("Presence penalty").fill("99")  # out of range: left out
    page.keyboard.press("Enter")
    page.get_by_label("Presence penalty").fill("")
    page.get_by_role("button", name="Done").click()
    ask(page, "Set.")
    expect(answered(page)).to_have_text("Hell")
    expect(page.locator(".message.assistant small").last).to_contain_text("cut at the limit")
    assert set(bodies[0]) == {"model", "messages", "stream", "stream_options"}
    assert {**bodies[1], "messages": 0, "stream_options": 0} == {
        "model": "scripted",
        "messages": 0,
        "stream": True,
        "stream_options": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 4,
        "seed": 5,
    }


def test_copying(visit: Any, model: Any, ask: Any) -> None:
    model.say = "Look:\n\n```\na < b && c\n```"
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "Code.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.locator("figure").get_by_role("button", name="Copy").click()
    expect(page.locator("figure").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "a < b && c"
    page.locator(".message.assistant .actions").get_by_role("button", name="Copy").click()
    expect(page.locator(".message.assistant .actions").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == model.say


def test_markdown_becomes_elements(visit: Any, model: Any, ask: Any, answered: Any) -> None:
    model.say = (
        "# Title\n\nSome **strong** and *soft* and `code <b>` and 2 * 3 * 4, snake_case_name.\n\n"
        "- one\n- two\n  1. inner\n  2. second\n- three\n\n> said\n\n[here](https://example.org/a)\n\n"
        "~~~js\nlet a = '```';\n~~~\n\n```python\nopen(1"
    )
    page = visit()
    ask(page, "Format.")
    body = answered(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert body.locator("h3").inner_text() == "Title"
    assert body.locator("strong").all_inner_texts() == ["strong"]
    assert body.locator("em").all_inner_texts() == ["soft"]
    assert body.locator("p code").all_inner_texts() == ["code <b>"]
    assert body.locator("p").first.inner_text().endswith("and 2 * 3 * 4, snake_case_name.")
    assert body.locator(":scope > ul > li").count() == 3
    assert body.locator("ul ol > li").all_inner_texts() == ["inner", "second"]
    assert body.locator("blockquote").inner_text() == "said"
    assert body.locator("a").get_attribute("href") == "https://example.org/a"
    assert "noopener" in body.locator("a").get_attribute("rel")
    assert body.locator("pre").all_inner_texts() == ["let a = '```';", "open(1"]
