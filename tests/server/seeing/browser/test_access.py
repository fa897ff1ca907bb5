"""The page in a browser: by keyboard, on small screens, for weak eyes and screen readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.thorough


def test_the_keyboard_alone_is_enough(visit: Any, model: Any, answered: Any) -> None:
    page = visit()
    focused = "document.activeElement.id || document.activeElement.textContent"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that leads past the header
    expect(page.get_by_label("Your message")).to_be_focused()
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    expect(answered(page)).to_have_text("Hello, you.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert "First line\nsecond line" in model.prompts[-1]
    expect(page.get_by_label("Your message")).to_be_focused()
    model.say = "word " * 300
    model.hold()
    page.keyboard.type("More")
    page.keyboard.press("Enter")
    model.let(10)
    expect(answered(page)).to_contain_text("word")
    page.keyboard.press("Escape")
    expect(page.locator(".message.assistant small").last).to_have_text("stopped")
    model.release()
    seen = []
    for _ in range(12):
        page.keyboard.press("Shift+Tab")
        seen.append(page.evaluate(focused))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"focus on {seen[-1]!r} cannot be seen"
        if seen[-1] == "Regenerate":
            model.say = "By keyboard."
            page.keyboard.press("Enter")
            break
    expect(answered(page)).to_have_text("By keyboard.")
    expect(page.get_by_label("Your message")).to_be_focused()
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate(focused) == "open-settings":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.evaluate(focused) == "open-settings"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(focused) == "tab-chat"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "tab-live"
    expect(page.get_by_role("tabpanel", name="Live")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()


def test_everything_has_a_name_for_screen_readers(visit: Any, model: Any, ask: Any) -> None:
    model.say = "```\ncode\n```"
    page = visit()
    ask(page, "Code.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas, [role]")].filter((one) =>
            !(one.textContent.trim() || one.labels?.length || one.ariaLabel || one.hasAttribute("aria-labelledby"))
        ).filter((one) => !["notice", "said"].includes(one.id)).map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    assert page.evaluate("document.documentElement.lang") == "en"
    expect(page.locator("#messages")).to_have_attribute("role", "log")


@pytest.mark.parametrize("width", [320, 360, 768])
def test_small_screens(visit: Any, model: Any, width: int, tmp_path: Path, ask: Any) -> None:
    model.say = f"{'w' * 200}\n\n```\n{'c' * 300}\n```\n\n| a | {'b' * 150} |"
    page = visit(
        {"served_model_name": ("a-very-long-model-name/" * 4,)},
        viewport={"width": width, "height": 640},
        has_touch=True,
    )
    fits = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
    ask(page, "u" * 200)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert page.evaluate(fits)
    box = page.get_by_role("button", name="Send").bounding_box()
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 640
    assert page.evaluate(
        "document.querySelector('#messages').scrollWidth <= document.querySelector('#messages').clientWidth"
    )
    page.get_by_role("tab", name="Live").click()
    expect(page.locator("#replicas li")).to_have_count(2)
    assert page.evaluate(fits)
    assert page.evaluate("document.querySelector('#view-live').scrollWidth <= innerWidth")
    page.locator("#about").scroll_into_view_if_needed()
    expect(page.locator("#about")).to_be_in_viewport()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Done").scroll_into_view_if_needed()
    expect(page.get_by_role("button", name="Done")).to_be_in_viewport()
    assert page.evaluate("document.querySelector('dialog').getBoundingClientRect().right <= innerWidth")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button")].filter((one) => one.checkVisibility())
            .map((one) => [one.textContent, one.getBoundingClientRect().height]).filter(([, height]) => height < 32)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(visit: Any, scheme: str, ask: Any) -> None:
    page = visit(color_scheme=scheme)
    ask(page, "Hello")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("tab", name="Live").click()
    expect(page.locator("#replicas li")).to_have_count(2)
    weak = page.evaluate(
        """() => {
            const light = (text) => {
                const [r, g, b] = text.match(/[\\d.]+/g).map((part) => {
                    const value = Number(part) / 255;
                    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const ground = (one) => {
                for (let at = one; at; at = at.parentElement) {
                    const colour = getComputedStyle(at).backgroundColor;
                    if (colour !== "rgba(0, 0, 0, 0)") return colour;
                }
            };
            const found = [];
            for (const one of document.querySelectorAll("body *")) {
                if (![...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
                if (!one.checkVisibility() && !one.closest("#view-chat") || one.disabled) continue;
                const [a, b] = [light(getComputedStyle(one).color), light(ground(one))].sort((x, y) => y - x);
                if ((a + 0.05) / (b + 0.05) < 4.5) found.push([one.outerHTML.slice(0, 80), (a + 0.05) / (b + 0.05)]);
            }
            return found;
        }"""
    )
    assert weak == []
