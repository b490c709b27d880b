"""Tables in a notebook are well-formed, whole, and hold no foreign markup."""

from html.parser import HTMLParser

from swin_quant.report.table import Column, ReportTable, figure, html_table


class Reader(HTMLParser):
    """Reads the cells of a page line by line, and the items of its list; fails where a tag is not closed in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.lines, self.said = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag in ("div", "p", "b", "table", "tr", "th", "td", "ul", "li", "br"), tag
        assert [name for name, _ in attributes] in ([], ["style"], ["data-title", "style"])
        if tag == "tr":
            self.lines.append([])
        elif tag in ("th", "td"):
            self.lines[-1].append("")
        elif tag == "li":
            self.said.append("")
        if tag != "br":
            self.open.append(tag)
        else:
            self.handle_data("\n")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("th", "td"):
            self.lines[-1][-1] += data
        elif self.open[-1] == "li":
            self.said[-1] += data


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
    read = Reader(html_table(TABLE, "<i>heading</i>"))
    assert read.lines == [["a <b>\nname", "size"], [EVIL, "1.2"], ["plain", "-"]]
    assert read.said == ["said of <all> & more"]
