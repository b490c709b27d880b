"""The page in a real browser, where there is one: as many nodes as Swin-L has, sorted, searched, looked at."""

import shutil
from pathlib import Path

import pytest

from swin_quant.cards.card import RunCard
from swin_quant.report.page import page
from swin_quant.report.page.data import Bins, NodeSummary, PageData

pytest.importorskip("vl_convert")
playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]
NODES = 561


def node(number):
    unit, part = divmod(number, 22)
    place = {"name": f"layers.{unit}.part{part}_quantizer", "row": f"layers.{unit}", "column": f"part{part}"}
    kind = {"role": "gemm_input", "on": number % 3 > 0, "kind": "int8", "bits": 8 if number % 2 else 4}
    sqnr = None if number % 10 == 0 else float((number * 31) % 97)
    ends = {"grid": "symmetric", "amax": float((number * 7919) % 1000), "low": -1.0, "high": 1.0}
    bins = Bins(-2.0, 2.0, [number] * 48)
    return NodeSummary(**place, **kind, **ends, clipped=None, sqnr_db=sqnr, costs_db=None, bins=bins)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    file = Path(tmp_path_factory.mktemp("page")) / "page.html"
    card = RunCard("swin_large", {}, {"size": 224})
    file.write_text(page([PageData("swin_large", [card], [node(number) for number in range(NODES)])]))
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.said, tab.asked = [], []
        tab.on("console", lambda message: tab.said.append(message.text))
        tab.on("pageerror", lambda error: tab.said.append(str(error)))
        tab.on("request", lambda request: tab.asked.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("#network-chart svg")
        yield tab
        browser.close()


def column(tab, key):
    return tab.evaluate(
        """key => {
            const at = [...document.querySelectorAll("#nodes th")].findIndex(cell => cell.dataset.key === key);
            return [...document.querySelectorAll("#nodes tbody tr")].map(row => row.cells[at].innerText);
        }""",
        key,
    )


def test_a_figure_sorts_both_ways_and_what_is_not_known_stays_below(opened):
    button = opened.locator("#nodes th[data-key=sqnr_db] button")
    for sign in (1, -1):
        button.focus()
        opened.keyboard.press("Enter")
        found = column(opened, "sqnr_db")
        known = [float(text) for text in found if text != "–"]
        assert len(found) == NODES and known == sorted(known, key=lambda value: sign * value)
        assert set(found[len(known) :]) == {"–"}


def test_words_are_searched_and_a_node_is_drawn(opened):
    opened.fill("#search", "layers.3. part1_")
    assert column(opened, "name") == ["layers.3.part1_quantizer"] and "1 of 561" in opened.inner_text("#found")
    opened.locator("#nodes tbody button").press("Enter")
    opened.wait_for_selector("#values svg")
    assert "layers.3.part1_quantizer" in opened.inner_text("#values-title")
    opened.fill("#search", "")


def test_nothing_is_said_and_nothing_is_asked_for(opened):
    assert opened.said == [] and len(opened.asked) == 1
