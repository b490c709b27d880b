"""Every format holds every figure and footnote; no text of a card changes a format's structure."""

import csv
import dataclasses
import io
import json
import re
import sys
from functools import partial

import pytest
from cards_of_results import CIFAR as DATASET
from cards_of_results import card_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result
from swin_quant.report.accuracy.footnotes import footnotes
from swin_quant.report.accuracy.render import FORMATS, SCHEMA, AccuracyTable, render, terminal
from swin_quant.report.accuracy.rows import COLUMNS, rows_of
from swin_quant.report.table import print_text

FLOAT = Result("torch", "float32", None, DATASET, 5000, 70.8, 98.12, None, 32, "cpu", ms_per_picture=12.3456)
HALF = dataclasses.replace(FLOAT, precision="bfloat16", acc1=70.78, ms_per_picture=8.1234)
COMPARED = {"agreement": 98.74, "sqnr_db": 35.61, "delta_acc1": -0.46, "delta_acc1_se": 0.11}
INT8 = Result("torch fake-quant", "int8", "ft-mode1", DATASET, 5000, 70.34, 97.96, None, 32, "cpu", 45.6789, **COMPARED)
INT8 = dataclasses.replace(INT8, unreadable=2, note="unreadable: a.png, b.png")
FIGURES = {"70.800", "98.120", "70.340", "97.960", "70.780", "12.346", "8.123", "45.679", "98.74", "35.6"}
FIGURES |= {"-0.460", "±0.110", "-0.160", "5000", "32x32"}
TEXTS = st.text(max_size=20)
DEAD = ["layers.0.blocks.0.attn.softmax_input_quantizer"]
card = partial(card_of, name="swin_tiny_patch4_window7_224", dead_nodes=DEAD)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e9)


def realistic() -> list[RunCard]:
    second = dataclasses.replace(INT8, policy="ft-mode2", acc1=70.82, delta_acc1=0.02, delta_acc1_se=0.05)
    names = ("swin_tiny_patch4_window7_224", "swinv2_base_patch4_window12to24_192to384_22kto1k_ft")
    methods = ("max", "percentile", "mse", "entropy")
    return [card(FLOAT, HALF, INT8, second, name=name, method=method) for name in names for method in methods]


def figures_of(text: str) -> set[str]:
    return set(re.findall(r"[±+-]?\d+\.\d+|\d+x\d+|\b\d+\b", text))


@pytest.mark.parametrize("width", [40, 72, 80, 100, 120, 160, 250])
def test_a_terminal_of_any_width_shows_every_figure_whole(width):
    text = terminal(rows_of(cards := realistic()), footnotes(rows_of(cards)), width)
    assert FIGURES | {"70.820", "+0.020", "±0.050"} <= figures_of(text)
    assert "…" not in text and text.count("98.74") == 16
    if width >= 80:
        assert max(map(cell_len, text.splitlines())) <= width


def test_a_table_of_four_calibrators_has_the_guide_s_titles_and_a_line_for_each_row_at_100_columns():
    text = render(realistic())
    for title in ("acc@1 ", "acc@5 ", "acc@1(I)", "acc@5(I)", "Δ acc@1", "Δ acc@5", "agree %", "SQNR dB", "ms(I)"):
        assert title in text
    lines = text.splitlines()
    assert sum("percentile 99.99" in line and "70.340" in line and "-0.460 ±0.110" in line for line in lines) == 2
    assert sum("+0.020 ±0.050 ~" in line for line in lines) == 8


def test_float_latencies_of_cards_under_one_heading_are_given_as_a_range():
    slower = dataclasses.replace(FLOAT, ms_per_picture=13.5)
    text = render([card(slower, INT8, method="max"), card(FLOAT, INT8)])
    assert "ms 12.346 to 13.500" in text and text.count("acc@1 70.800") == 1


def test_long_policy_names_fold_and_figures_do_not():
    long = dataclasses.replace(INT8, policy="searched-" + "x" * 80)
    lines = terminal(rows_of([card(FLOAT, long)]), [], 80).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert sum(line.count("x") for line in lines[3:-4]) >= 80 and any("-0.460 ±0.110" in line for line in lines)


def test_a_card_with_float_results_only_has_a_heading_and_no_table():
    text = render([card(FLOAT, HALF)])
    assert {"70.800", "98.120", "70.780"} <= figures_of(text) and "acc@1(I)" not in text


def test_rich_markup_is_only_text_and_colour_only_where_asked():
    assert "[red]x[/]" in render([card(FLOAT, dataclasses.replace(INT8, policy="[red]x[/]"))])
    rows = rows_of(realistic())
    assert "\x1b[" in terminal(rows, [], 100, color=True) and "\x1b[" not in terminal(rows, [], 100)


@pytest.mark.parametrize("form", FORMATS)
def test_footnotes_are_in_every_format(form):
    text = " ".join(render([card(FLOAT, INT8)], form).replace("\n", " ").replace("\\", "").split())
    for words in ("a.png, b.png", "simulation, not of an INT8 engine", "1 dead node", "cpu, batch 32"):
        assert words in text


def test_markdown_is_one_table_of_rounded_figures():
    text = render(realistic(), "markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 16 and FIGURES <= figures_of(text)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<tr>") == 17 and "<td>swin_tiny_patch4_window7_224</td>" in html


def test_short_markdown_has_what_differs_in_columns_and_what_does_not_below():
    table = AccuracyTable.of(
        [card(FLOAT, HALF, INT8, dataclasses.replace(INT8, policy="qdq", unreadable=0, note=None))]
    )
    first, _, *rows = [line for line in table.short().text("markdown").splitlines() if line.startswith("|")]
    titles = [title.strip() for title in first.strip("|").split("|")]
    assert titles == ["name", "policy", "acc@1", "acc@1(I)", "Δ acc@1", "agree %", "ms", "ms(I)", "note"]
    assert rows[0].endswith("| 1 |") and rows[1].endswith("|  |")
    text = table.short().text("markdown")
    for fact in ("dataset cifar10/val", "resolution 32x32", "pictures 5000", "engine torch fake-quant", "device cpu"):
        assert fact in text
    assert "[1] 2 unreadable" in text.replace("\\", "")
    two = AccuracyTable.of([card(FLOAT, INT8, dataclasses.replace(INT8, engine="openvino"))]).short()
    assert "| engine |" in two.text("markdown") and "engine torch" not in two.shared


def test_marks_of_footnotes_are_beside_the_rows_they_are_about():
    other = dataclasses.replace(INT8, policy="qdq", unreadable=0, note=None)
    lines = render([card(FLOAT, INT8, other), card(FLOAT, name="float")]).splitlines()
    (number,) = [re.match(r"\* \[(\d)\] 2 unreadable", line)[1] for line in lines if " 2 unreadable" in line]
    of = {line.split()[0]: line.split("±0.110")[1].split() for line in lines if "±0.110" in line}
    assert number in of["ft-mode1"][3:] and number not in of["qdq"][3:]


@given(policy=TEXTS, dataset=TEXTS, engine=st.text(alphabet="|\\`*_~[]<&\n\r ab=-+@'\"", max_size=20))
@example(policy="", dataset="__0__", engine="")
@settings(max_examples=60, deadline=None)
def test_no_text_adds_a_column_or_a_line_to_markdown(policy, dataset, engine):
    place = {**DATASET, "name": dataset}
    quantized = dataclasses.replace(INT8, policy=policy, engine=engine, dataset=place, note=None, unreadable=0)
    text = render([card(quantized)], "markdown")
    width = sum(bool(column.title) and not column.may_lack for column in COLUMNS)
    table = [line for line in text.split("\n") if line.startswith("|")]
    assert len(table) == 3 and {line.count("|") for line in table} == {width + 1}
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<tr>") == 2 and html.count("<td") == width
    assert not re.search(r"<(?!/?(table|thead|tbody|tr|th|td|ul|li|p)\b)", html)


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


def test_numbers_in_csv_stay_numbers():
    read = next(csv.DictReader(io.StringIO(render([card(FLOAT, INT8)], "csv"))))
    assert float(read["delta_acc1"]) == 70.34 - 70.8 and read["delta_acc1"].startswith("-")
    assert (read["resolution"], read["pictures"], read["batch_size"]) == ("32", "5000", "32")
    assert read["half_acc1"] == "" and "simulation" in read["notes"]


def test_json_has_a_schema_unrounded_figures_and_null_for_what_was_not_measured():
    content = json.loads(render([card(FLOAT, INT8)], "json"))
    (row,) = content["rows"]
    assert content["schema"] == SCHEMA and row["ms"] == 12.3456 and row["half_acc1"] is None
    assert row["delta_acc1"] == 70.34 - 70.8 and row["delta_acc1_se"] == 0.11
    assert all(note["rows"] == [0] for note in content["footnotes"]) and len(content["footnotes"]) == 4


def test_printing_to_a_terminal_of_another_encoding_does_not_fail(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", narrow)
    print_text("-0.460 ±0.110\n")
    narrow.flush()
    assert narrow.buffer.getvalue() == b"-0.460 ?0.110\n"


def test_the_width_of_the_terminal_is_used(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    AccuracyTable.of(realistic()).show()
    narrow = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "160")
    AccuracyTable.of(realistic()).show()
    assert max(map(cell_len, narrow.splitlines())) <= 80 < max(map(cell_len, capsys.readouterr().out.splitlines()))


def unlike_cards(count: int) -> list[RunCard]:
    """Each with a heading, an engine's own float form and footnotes of its own; baselines are of two checkpoints."""
    cards = []
    for number in range(count):
        quantized = dataclasses.replace(FLOAT, precision="int8", policy=f"p{number}", acc1=79.0 - number / 1000)
        results = (
            dataclasses.replace(FLOAT, ms_per_picture=12.0 + number),
            dataclasses.replace(FLOAT, precision="bfloat16"),
            dataclasses.replace(FLOAT, precision="float16", acc1=79.5),
            dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=3.0),
            dataclasses.replace(quantized, engine="torch fake-quant", unreadable=1),
            dataclasses.replace(quantized, engine="openvino", note=f"remark {number}"),
        )
        source = {"file": "x.pth", "sha256": f"{number % 2:064}", "format": "pth"}
        records = [dataclasses.asdict(result) for result in results]
        cards.append(RunCard(f"model_{number:04}", {}, {"size": 32}, source=source, results=records))
    return cards


def calls(function, *arguments) -> int:
    """How many functions are called, Python's own among them."""
    count = 0

    def one_more(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(one_more)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("form", FORMATS)
def test_work_grows_as_the_cards_do(form):
    render(unlike_cards(2), form)  # what is imported and cached once
    few, many = (calls(render, unlike_cards(count), form) for count in (30, 60))
    assert many < 2.2 * few
