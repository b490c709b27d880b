"""Every format holds every figure and footnote; no text of a card changes a format's structure."""

import csv
import dataclasses
import io
import json
import re
from functools import partial

import pytest
from cards_of_results import CIFAR as DATASET
from cards_of_results import VERIFICATION, card_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.report import FORMATS
from swin_quant.report.accuracy import BLOCK_COLUMNS, SCHEMA, AccuracyTable

FLOAT = Result("torch", "float32", None, DATASET, 5000, 70.8, 98.12, None, 32, "cpu", ms_per_picture=12.3456)
HALF = dataclasses.replace(FLOAT, precision="bfloat16", acc1=70.78, ms_per_picture=8.1234)
COMPARED = {"agreement": 98.74, "sqnr_db": 35.61, "delta_acc1": -0.46, "delta_acc1_se": 0.11}
INT8 = Result("torch fake-quant", "int8", "ft-mode1", DATASET, 5000, 70.34, 97.96, None, 32, "cpu", 45.6789, **COMPARED)
INT8 = dataclasses.replace(INT8, unreadable=2, note="unreadable: a.png, b.png")
FIGURES = {"70.80", "70.34", "70.78", "12.35", "8.12", "98.74", "-0.46", "±0.11", "5000", "32x32"}
WIDE = {"98.12", "97.96", "35.6"}  # where there is room
TEXTS = st.text(max_size=20)
DEAD = ["layers.0.blocks.0.attn.softmax_input_quantizer"]
card = partial(card_of, name="swin_tiny_patch4_window7_224", dead_nodes=DEAD)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e9)


def realistic() -> list[RunCard]:
    second = dataclasses.replace(INT8, policy="ft-mode2", acc1=70.82, delta_acc1=0.02, delta_acc1_se=0.05)
    names = ("swin_tiny_patch4_window7_224", "swinv2_base_patch4_window12to24_192to384_22kto1k_ft")
    methods = ("max", "percentile", "mse", "entropy")
    return [card(FLOAT, HALF, INT8, second, name=name, method=method) for name in names for method in methods]


def render(cards, form):
    return AccuracyTable.from_cards(cards).text(form)


def figures_of(text: str) -> set[str]:
    return set(re.findall(r"[±+-]?\d+\.\d+|\d+x\d+|\b\d+\b", text))


@pytest.fixture
def at(monkeypatch, capsys):
    """at(width, cards) -> their table on a terminal of this width."""

    def show(width, cards):
        monkeypatch.setenv("COLUMNS", str(width))
        AccuracyTable.from_cards(cards).show()
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize("width", [40, 72, 80, 100, 120, 160, 250])
def test_a_terminal_of_any_width_shows_every_figure_whole(at, width):
    text = at(width, realistic())
    assert FIGURES | {"70.82", "+0.02", "±0.05"} <= figures_of(text)
    assert "…" not in text and text.count("98.74") == 16 and (WIDE <= figures_of(text)) == (width >= 100)
    if width >= 80:
        assert max(map(cell_len, text.splitlines())) <= width


def on_openvino() -> list[RunCard]:
    """The card that `quantize` leaves: float on torch and on the engine, int8 on the engine, verified."""
    own = dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=1.41, agreement=100.0, sqnr_db=120.0)
    int8 = dataclasses.replace(own, precision="int8", policy="openvino", acc1=70.7, ms_per_picture=0.61)
    int8 = dataclasses.replace(int8, delta_acc1=-0.1, delta_acc1_se=0.1, agreement=98.7, sqnr_db=35.6)
    return [card_of(FLOAT, HALF, own, int8, calibration=None).with_verification(VERIFICATION | {"policy": "openvino"})]


def test_a_result_is_one_line_at_80_columns_and_no_footnote_outweighs_it(at):
    """The engine's float stands right above its int8; delta, agreement, engine and verification are all there."""
    heading, titles, _, *lines = at(80, on_openvino()).splitlines()
    assert "cifar10/val, 5000 pictures" in heading and "cpu, batch 32" in heading
    assert titles.split() == ["result", "engine", "acc@1", "Δ", "acc@1", "agree", "SQNR", "dB", "ms", "verified"]
    assert [line.split()[:2] for line in lines[:2]] == [["float32", "torch"], ["bfloat16", "torch"]]
    assert lines[2].split()[:3] == ["float32", "openvino", "70.80"] and lines[2].split()[-1] == "1.41"
    assert lines[3].split() == "int8 openvino openvino 70.70 -0.10 ±0.10 ~ 98.70 35.6 0.61 yes".split()
    assert lines[4] == "" and len(lines[5:]) <= 2


def test_calibrations_stand_apart_and_a_float_model_that_several_cards_measured_once_in_each(at):
    text = at(80, realistic())
    assert " ".join(text.split()).count("calibrator percentile 99.99") == 2 and text.count("-0.46 ±0.11") == 8
    slower = dataclasses.replace(FLOAT, ms_per_picture=13.5)
    other = dataclasses.replace(INT8, policy="qdq")
    text = at(80, [card(slower, INT8), card(FLOAT, other)])
    assert text.count("float32") == 2 and "12.35" in text and "13.50" not in text, "one line, and in the legend"


def test_a_notebook_and_the_page_have_a_table_for_each_block_and_one_list_of_remarks():
    table = AccuracyTable.from_cards(realistic()[:2])
    html = table._repr_html_()
    assert str(table).count("70.34") == 2 and "Δ acc@1" in str(table), "printed in Python"
    assert html.count("<table>") == 2 and html.count("<ul>") == 1 and html.count("70.34") == 2
    for title in ("engine", "Δ acc@1", "agree", "ms"):
        assert html.count(f">{title}</th>") == 2


@pytest.mark.parametrize("form", [*FORMATS, "json"])
def test_footnotes_are_in_every_format(form):
    text = " ".join(render([card(FLOAT, INT8)], form).replace("\n", " ").replace("\\", "").split())
    for words in ("a.png, b.png", "simulation, not of an INT8 engine", "1 dead node"):
        assert words in text


def test_markdown_is_a_table_of_rounded_figures_for_each_block():
    text = render(realistic(), "markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 8 * (2 + 4) and FIGURES | WIDE <= figures_of(text)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<tr>") == 8 * 5 and html.count("<strong>swin_tiny_patch4_window7_224: ") == 4


def test_the_float_that_deltas_are_against_stands_first_and_has_none():
    own = dataclasses.replace(FLOAT, engine="openvino", delta_acc1=0.0, delta_acc1_se=0.0)
    lines = [line.split("|") for line in render([card(own, INT8, FLOAT)], "markdown").split("\n") if line[:2] == "| "]
    deltas = {line[2].strip(): line[lines[0].index(" Δ acc@1 ")].strip() for line in lines[1:] if "---" not in line[1]}
    assert deltas == {"torch": "", "openvino": "+0.00 ±0.00 ~", "torch fake-quant": "-0.46 ±0.11"}
    assert next(iter(deltas)) == "torch"


@given(policy=TEXTS, dataset=TEXTS, engine=st.text(alphabet="|\\`*_~[]<&\n\r ab=-+@'\"", max_size=20))
@example(policy="", dataset="__0__", engine="")
@settings(max_examples=60, deadline=None)
def test_no_text_adds_a_column_or_a_line_to_markdown(policy, dataset, engine):
    place = {**DATASET, "name": dataset}
    quantized = dataclasses.replace(INT8, policy=policy, engine=engine, dataset=place, note=None, unreadable=0)
    text = render([card(quantized)], "markdown")
    width = sum(not column.may_lack for column in BLOCK_COLUMNS)
    table = [line for line in text.split("\n") if line.startswith("|")]
    assert len(table) == 3 and {line.count("|") for line in table} == {width + 1}
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<tr>") == 2 and html.count("<td") == width
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|ul|li|p|strong)\b)", html)


@given(policy=TEXTS, engine=st.text(alphabet="=+-@,;\"'\n\r\tab", max_size=10), acc=NUMBERS, ms=st.none() | NUMBERS)
@settings(max_examples=60, deadline=None)
def test_csv_gives_back_every_figure_unrounded_and_every_text(policy, engine, acc, ms):
    cards = [card(FLOAT, dataclasses.replace(INT8, policy=policy, engine=engine, acc1=acc, ms_per_picture=ms))]
    (recorded,) = json.loads(render(cards, "json"))["rows"]
    text = render(cards, "csv")
    assert text.endswith("\r\n")
    header, values = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert header == [*recorded, "notes"] and all(re.fullmatch(r"[a-z0-9_]+", key) for key in header)
    read = dict(zip(header, values, strict=True))
    assert float(read["quantized_acc1"]) == acc and float(read["delta_acc1"]) == acc - 70.8
    assert read["quantized_ms"] == ("" if ms is None else repr(float(ms)))
    for key in ("policy", "engine"):
        assert read[key][:1] not in ("=", "+", "-", "@")
        assert read[key].removeprefix("'") == recorded[key].removeprefix("'")


def test_json_has_a_schema_unrounded_figures_and_null_for_what_was_not_measured():
    content = json.loads(render([card(FLOAT, INT8)], "json"))
    (row,) = content["rows"]
    assert content["schema"] == SCHEMA and row["ms"] == 12.3456 and row["half_acc1"] is None
    assert row["delta_acc1"] == 70.34 - 70.8 and row["delta_acc1_se"] == 0.11
    assert all(note["rows"] == [0] for note in content["footnotes"]) and len(content["footnotes"]) == 3
