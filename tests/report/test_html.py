"""Tables in a notebook are well-formed, whole, and hold no foreign markup."""

from xml.etree import ElementTree

from swin_quant.report.table import Column, ReportTable, figure, html_table

EVIL = "<script>alert('x')</script> & \"q\" </td>"
ROWS = [{"name": EVIL, "size": 1.25, "note": None}, {"name": "plain", "size": None, "note": None}]
TABLE = ReportTable(
    (
        Column("name", "a <b>\nname", lambda row: row["name"], style=lambda row: "red"),
        figure("size", "size", lambda row: row["size"], "{:.1f}"),
        Column("note", "note", lambda row: row["note"], may_lack=True),
    ),
    ROWS,
    ["said of <all> & more"],
    style=lambda row: "dim" if row["name"] == "plain" else "",
)


def test_it_holds_what_the_table_says_and_escapes_it():
    page = ElementTree.fromstring(html_table(TABLE, "<i>heading</i>").replace("<br>", "\n"))
    assert {node.tag for node in page.iter()} == {"div", "p", "b", "table", "tr", "th", "td", "ul", "li"}
    assert {key for node in page.iter() for key in node.attrib} == {"style", "data-title"}
    lines = [["".join(cell.itertext()) for cell in line] for line in page.iter("tr")]
    assert lines == [["a <b>\nname", "size"], [EVIL, "1.2"], ["plain", "-"]]
    assert [item.text for item in page.iter("li")] == ["said of <all> & more"]
