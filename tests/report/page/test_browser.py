"""The page in a real browser, where there is one: as many nodes as Swin-L has, sorted, searched, looked at; on a phone
nothing that decides is to be scrolled for, and the keyboard's focus is seen."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cards_of_results import ARTIFACT, INT8, OWN, TORCH, card_of

from swin_quant.cards.card import RunCard
from swin_quant.report.page import page
from swin_quant.report.page.data import Bins, NodeSummary, PageData
from swin_quant.report.verdict import card_verdict

pytest.importorskip("vl_convert")
playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]
NODES = 561
PHONE = {"width": 390, "height": 844}
NAME = "swin_large_patch4_window12_384_22kto1k"
FILE = f"{NAME}_int8_openvino.onnx"  # wider than a phone


def node(number):
    unit, part = divmod(number, 22)
    place = (f"layers.{unit}.part{part}_quantizer", f"layers.{unit}", f"part{part}")
    kind = ("gemm_input", number % 3 > 0, "int8", 8 if number % 2 else 4, "symmetric")
    sqnr = None if number % 10 == 0 else float((number * 31) % 97)
    ends = (float((number * 7919) % 1000), -1.0, 1.0)
    return NodeSummary(*place, *kind, *ends, None, sqnr, None, bins=Bins(-2.0, 2.0, [number] * 48))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    file = Path(tmp_path_factory.mktemp("page")) / "page.html"
    card = RunCard("swin_large", {}, {"size": 224})
    file.write_text(
        page([PageData("swin_large", {"swin_large.json": card}, [node(number) for number in range(NODES)])])
    )
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


def test_the_last_column_is_seen_without_scrolling(opened):
    """On a screen 1280 pixels wide, where the last titles are as long as those of engines."""
    opened.set_viewport_size({"width": 1280, "height": 900})
    titles = opened.locator("#nodes th button")
    for place, title in ((-2, "openvino · cpu-operators"), (-1, "onnxruntime · onnxruntime")):
        titles.nth(place).evaluate("(button, title) => { button.textContent = title; }", title)
    assert opened.evaluate("(box => box.scrollWidth - box.clientWidth)(document.getElementById('nodes'))") <= 0


def test_nothing_is_said_and_nothing_is_asked_for(opened):
    assert opened.said == [] and len(opened.asked) == 1


@pytest.fixture(scope="module")
def phone(opened, tmp_path_factory):
    """The page of a deployed file on a phone, in the browser of `opened`; its picture lies beside it."""
    folder = tmp_path_factory.mktemp("phone")
    record = {**ARTIFACT, "file": FILE, "options": {"target": "openvino"}}
    card = replace(card_of(TORCH, OWN, INT8), artifact=record, name=NAME)
    nodes, verdict = [node(number) for number in range(30)], card_verdict(card, folder / FILE, folder)
    data = PageData(NAME, {f"{NAME}.json": card}, nodes, verdicts=[verdict])
    (folder / "page.html").write_text(page([data]))
    tab = opened.context.browser.new_page(viewport=PHONE)
    tab.goto((folder / "page.html").as_uri())
    tab.wait_for_selector("#network-chart svg")
    tab.screenshot(path=folder / "page.png")
    return tab


def test_on_a_phone_each_row_is_a_card_and_nothing_that_decides_is_scrolled_for(phone):
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    cells = phone.evaluate(
        """() => [...document.querySelectorAll(".cards td")].filter(cell => cell.innerText.trim()).map(cell => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            const {left, right} = range.getBoundingClientRect();
            return [getComputedStyle(cell, "::before").content.slice(1, -1), cell.innerText, left, right];
        })"""
    )
    assert all(0 <= left < right <= PHONE["width"] for _, _, left, right in cells)
    seen = {title: text for title, text, *_ in reversed(cells)}  # the first table's
    assert seen["deploy"] == FILE and "2.0 times as fast" in seen["result"]
    assert seen["next"].startswith("swin-quant serve")
    assert {"acc@1", "ms"} < seen.keys() and any("Δ" in title for title in seen)
    assert phone.evaluate(
        """() => [...document.querySelectorAll(".cards")].every(place => place.scrollWidth <= place.clientWidth)"""
    )


CONTRASTS = """() => {
    const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const pixel = (...colors) => {
        for (const color of colors) { paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); }
        return [...paint.getImageData(0, 0, 1, 1).data];
    };
    const light = rgb => rgb.slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
    const paper = getComputedStyle(document.body).backgroundColor, behind = light(pixel(paper));
    const found = [];
    for (const cell of [...document.querySelectorAll(".cards td")].filter(one => one.innerText.trim())) {
        let shown = 1;
        for (let at = cell; at instanceof Element; at = at.parentElement) shown *= getComputedStyle(at).opacity;
        for (const part of [undefined, "::before"]) {
            const front = light(pixel(paper, getComputedStyle(cell, part).color)) * shown + behind * (1 - shown);
            found.push([cell.innerText, (Math.max(front, behind) + 0.05) / (Math.min(front, behind) + 0.05)]);
        }
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_and_titles_of_cards_have_the_contrast_that_wcag_asks_for(phone, scheme):
    """A ratio of 4.5 (WCAG 2.2, 1.4.3); figures that the pictures cannot tell from zero are paler than others."""
    phone.emulate_media(color_scheme=scheme)
    found = phone.evaluate(CONTRASTS)
    phone.emulate_media(color_scheme="light")
    assert found and [(text, round(ratio, 1)) for text, ratio in found if ratio < 4.5] == []
    assert any("~" in text for text, _ in found)


def test_the_keyboard_s_focus_is_seen_wherever_it_goes(phone):
    stops = set()
    for _ in range(60):
        phone.keyboard.press("Tab")
        name, style, width = phone.evaluate(
            """() => {
                const at = document.activeElement, style = getComputedStyle(at);
                const name = at.id || at.innerText.slice(0, 30) || at.tagName;
                return [name, style.outlineStyle, parseFloat(style.outlineWidth)];
            }"""
        )
        if name == NAME[:30]:  # the page as a whole, behind its last stop
            break
        assert style != "none" and width >= 1, name
        stops.add(name)
    assert {"search", "nodes", "Deploy", "Accuracy"} <= stops
