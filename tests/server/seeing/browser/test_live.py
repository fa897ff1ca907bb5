"""The page in a browser: the live view."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.thorough


def inked(page: Page, canvas: str) -> list[int]:
    """How many pixels of each column of a chart bear the first engine's colour."""
    return page.evaluate(
        """id => {
            const canvas = document.getElementById(id);
            const colour = getComputedStyle(canvas).getPropertyValue("--series-0").trim();
            const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return Array.from({ length: width }, (_, x) => {
                let found = 0;
                for (let y = 0; y < height; y += 1) {
                    const at = 4 * (y * width + x);
                    const near = wanted.every((value, i) => Math.abs(value - data[at + i]) < 12);
                    if (data[at + 3] > 150 && near) found += 1;
                }
                return found;
            });
        }""",
        canvas,
    )


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_live_view_moves(visit: Any, watched: Any, model: Any, motion: str, ask: Any) -> None:
    model.say = "word " * 300
    model.pause = 0.02
    watched.expected = ("willReadFrequently",)  # said of this test, which looks at the pixels
    page = visit(reduced_motion=motion)
    ask(page, "Talk.")
    page.get_by_role("tab", name="Live").click()
    chart = page.locator("#chart-passes")
    expect(chart).to_have_attribute("aria-label", re.compile("8 of 64"))
    expect(page.locator("#pass-note")).to_have_text("8 of 64 in the last one")
    page.wait_for_function("document.querySelector('#figures strong').textContent > 0")
    expect(page.locator("#latency tbody tr").nth(1).locator("td").first).to_have_text(re.compile(r"\d+ ms"))
    expect(page.locator("#cache-legend")).to_have_text(re.compile(r"used\s*11\s*cached\s*20\s*free\s*69"))
    rows = page.locator("#replicas li")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("ready")
    expect(rows.last).to_contain_text("it was killed · restarted 2 times")
    assert rows.last.get_attribute("data-state") == "restarting"
    page.wait_for_timeout(1500)
    first = inked(page, "chart-passes")
    assert sum(map(bool, first)) > 20
    page.wait_for_timeout(1000)
    second = inked(page, "chart-passes")
    start = [next(x for x, found in enumerate(columns) if found) for columns in (first, second)]
    assert start[1] < start[0]  # what came first has moved to the left
    assert any(inked(page, "chart-queue"))
    assert chart.bounding_box()["height"] == 330  # a lane for each of the two engines
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#pulse-text")).to_have_text("ready")


def test_history_is_there_for_who_comes_later(visit: Any, model: Any, ask: Any) -> None:
    page = visit()
    ask(page, "Talk.")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.reload()
    page.goto(page.url + "#live")
    page.reload()
    expect(page.get_by_role("tab", name="Live")).to_have_attribute("aria-selected", "true")
    page.wait_for_timeout(1000)
    assert any(inked(page, "chart-passes"))
