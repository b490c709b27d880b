"""A table on a terminal: figures whole, names folded only where they must be, styles only where they are wanted. In a
notebook it is well-formed, whole, and holds no foreign markup."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from swin_quant.report.table import Column, ReportTable, figure, folded, has_colors, html_table, terminal

NAMES = ("layers.0.blocks.0.attn.qkv._input_quantizer", "a name of several words that is long", "x")
COLUMNS = (
    Column("name", "name", lambda row: row[0], fold=True),
    figure("value", "value", lambda row: row[1], "{:.3f}"),
    Column("note", "note", lambda row: row[2], blank=""),
)
TABLE = ReportTable(
    COLUMNS,
    [(name, 1234.5678, "ok") for name in NAMES] + [("last", None, None)],
    ["a remark of a few words, which is folded where the terminal is narrow, and goes on below its first word"],
    style=lambda row: "dim" if row[0] == "x" else "",
)


@pytest.mark.parametrize("width", [26, 40, 60, 200])
def test_no_line_is_longer_than_the_terminal_and_nothing_is_lost(width):
    text = terminal(TABLE, width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert text.count("1234.568") == 3
    first = "".join(line[: width - 16].strip() for line in text.splitlines()[1:-1])
    for name in NAMES:
        assert name.replace(" ", "") in first.replace(" ", "")


def test_words_stay_whole_where_another_column_can_be_narrowed_between_its_words():
    titles = enumerate(("name", "a long title"))
    columns = [Column(str(at), title, lambda row, at=at: row[at], fold=True) for at, title in titles]
    lines = terminal(ReportTable(columns, [("layers.0.downsample", "some words that can be folded")]), 32).splitlines()
    assert max(map(len, lines)) <= 32 and sum("layers.0.downsample" in line for line in lines) == 1


LETTERS = st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" ")


@given(st.text(LETTERS, max_size=60), st.integers(2, 30))
def test_folding_loses_no_character(text, width):
    lines = folded(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "") and max(map(cell_len, lines)) <= width


def test_colours_are_off_in_a_pipe_and_where_the_user_wants_none(monkeypatch):
    assert not has_colors()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colors()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors()


def test_a_narrow_terminal_leaves_out_spare_columns_the_last_first_and_says_which():
    columns = [COLUMNS[0], *(Column(word, word, lambda row: "x" * 12, spare=True) for word in ("one", "two"))]
    table = ReportTable(columns, [("a name that stays", None, None)])
    heads = [terminal(table, width).splitlines()[0].split() for width in (60, 40, 20)]
    assert heads == [["name", "one", "two"], ["name", "one"], ["name"]]
    assert "wider" not in terminal(table, 60) and terminal(table, 20).count("one, two") == 1


EVIL = "<script>alert('x')</script> & \"q\" </td>"
STRANGE = [{"name": EVIL, "size": 1.25, "note": None}, {"name": "plain", "size": None, "note": None}]
MARKUP = ReportTable(
    (
        Column("name", "a <b>\nname", lambda row: row["name"], style=lambda row: "red"),
        figure("size", "size", lambda row: row["size"], "{:.1f}"),
        Column("note", "note", lambda row: row["note"], may_lack=True),
    ),
    STRANGE,
    ["said of <all> & more"],
    style=lambda row: "dim" if row["name"] == "plain" else "",
)


def test_it_holds_what_the_table_says_and_escapes_it():
    page = ElementTree.fromstring(html_table(MARKUP, "<i>heading</i>").replace("<br>", "\n"))
    assert {node.tag for node in page.iter()} == {"div", "p", "b", "table", "tr", "th", "td", "ul", "li"}
    assert {key for node in page.iter() for key in node.attrib} == {"style", "data-title"}
    lines = [["".join(cell.itertext()) for cell in line] for line in page.iter("tr")]
    assert lines == [["a <b>\nname", "size"], [EVIL, "1.2"], ["plain", "-"]]
    assert [item.text for item in page.iter("li")] == ["said of <all> & more"]
