"""The page in a browser: hostile text, keys, and trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import expect

pytestmark = pytest.mark.thorough

NASTY = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'


def test_markup_stays_text(visit: Any, model: Any, backend: Any, watched: Any, ask: Any, answered: Any) -> None:
    model.say = (
        f"{NASTY}\n\n# {NASTY}\n\n- {NASTY}\n\n**{NASTY}** `{NASTY}`\n\n"
        "[x](javascript:window.pwned=1) [y](data:text/html,<script>1</script>)\n\n"
        f"```<script>\n{NASTY}\n```"
    )
    backend.detail = NASTY
    page = visit({"served_model_name": (NASTY, f"2{NASTY}")})
    ask(page, NASTY)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".message.user .body")).to_have_text(NASTY)
    assert answered(page).inner_text().count(NASTY) == 6
    expect(page.locator("#model-name")).to_have_text(NASTY)
    page.get_by_role("tab", name="Live").click()
    expect(page.locator("#replicas li").last).to_contain_text(NASTY)
    page.reload()
    page.get_by_role("tab", name="Chat").click()
    assert answered(page).inner_text().count(NASTY) == 6
    assert page.locator("main img, main script, select script, a[href^=javascript], a[href^=data]").count() == 0
    assert page.evaluate("window.pwned") is None
    # The control: such markup would do harm if it were parsed; and the policy stands in the way of parsing any.
    watched.expected = ("TrustedHTML",)
    assert (
        page.evaluate(
            "html => { try { document.body.innerHTML = html; return 'set' } catch { return 'refused' } }", NASTY
        )
        == "refused"
    )


def test_what_is_read_back_is_checked(visit: Any) -> None:
    page = visit()
    for stored in ("{", '"x"', '[1, null, {"role": "system", "content": "x"}, {"role": "user", "content": {}}]'):
        page.evaluate("text => localStorage.setItem('fastgen.chat.1', text)", stored)
        page.evaluate('localStorage.setItem(\'fastgen.settings.1\', \'{"theme": 5, "temperature": "x"}\')')
        # Leaving writes the conversation; what others write must survive that to be read.
        page.evaluate(
            "text => addEventListener('pagehide', () => localStorage.setItem('fastgen.chat.1', text))", stored
        )
        page.reload()
        expect(page.get_by_text("Say something to the model.")).to_be_visible()


def test_a_key_is_asked_for_and_not_kept(visit: Any, watched: Any, ask: Any, answered: Any) -> None:
    watched.expected = ("401",)
    page = visit({"api_key": ("the-key",)})
    expect(page.locator("#pulse-text")).to_have_text("key needed")
    ask(page, "Hello?")
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type("the-key")
    page.keyboard.press("Enter")
    expect(page.locator("#pulse-text")).to_have_text("ready")
    expect(page.get_by_role("alert")).to_contain_text("API key")
    page.get_by_role("button", name="Try again").click()
    expect(answered(page)).to_have_text("Hello, you.")
    assert "the-key" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    expect(page.locator("#pulse-text")).to_have_text("ready")
    assert page.evaluate("sessionStorage.length") == 1


def test_errors_are_shown_and_nothing_is_lost(visit: Any, watched: Any, model: Any, ask: Any, answered: Any) -> None:
    watched.expected = ("400",)
    page = visit()
    ask(page, "x" * 3000)
    expect(page.get_by_role("alert")).to_contain_text("tokens")
    expect(page.locator(".message.user .body")).to_have_text("x" * 3000)
    expect(page.locator(".message.assistant")).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page, "Short.")
    expect(answered(page)).to_have_text("Hello, you.")


def test_an_engine_that_dies_in_mid_answer(visit: Any, model: Any, backend: Any, ask: Any, answered: Any) -> None:
    model.say = "word " * 100
    model.hold()
    page = visit()
    ask(page, "Talk.")
    model.let(20)
    expect(answered(page)).to_contain_text("word word word")
    closing = threading.Thread(target=backend.loop.close)
    closing.start()
    model.release()
    closing.join()
    expect(page.get_by_role("alert")).to_contain_text("closed")
    expect(page.locator(".message.assistant small")).to_have_text("broke off")
    expect(answered(page)).to_contain_text("word word word")


def test_the_server_goes_and_comes_back(
    contexts: Any, watched: Any, make_app: Any, serve: Callable[..., str], ask: Any, answered: Any
) -> None:
    watched.expected = ("ERR_", "404", "503")
    page = contexts().new_page()
    watched.watch(page)
    with ExitStack() as stack:
        app = make_app()
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#pulse-text")).to_have_text("ready")
        stack.callback(thread.join, 20)
        server.should_exit = True
    expect(page.locator("#pulse-text")).to_have_text("no connection")
    ask(page, "Anybody?")
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    serve(app, port)
    expect(page.locator("#pulse-text")).to_have_text("ready")
    page.get_by_role("button", name="Try again").click()
    expect(answered(page)).to_have_text("Hello, you.")
