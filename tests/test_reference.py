"""Every fact that the code cites can be opened: its section is in docs/reference."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = set(
    re.findall(r"^##? ([0-9]+(?:\.[0-9]+)?) ", "\n".join(p.read_text() for p in ROOT.glob("docs/reference/*.md")), re.M)
)
CITATION = re.compile(r"docs/reference,\s+sections?\s+([0-9., and to\n]+)")


@pytest.mark.parametrize("folder", ["swin_quant", "tests", "configs", "benchmarks"])
def test_sections_that_are_cited_exist(folder):
    files = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]
    cited = {
        (str(file.relative_to(ROOT)), number)
        for file in files
        for numbers in CITATION.findall(file.read_text())
        for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", numbers)
    }
    tops = {heading.partition(".")[0] for heading in HEADINGS}
    assert {(file, number) for file, number in cited if number not in HEADINGS | tops} == set()


def test_nothing_cites_what_readers_do_not_have():
    files = [
        file
        for folder in ("swin_quant", "configs")
        for file in (ROOT / folder).rglob("*.*")
        if file.suffix in (".py", ".yaml")
    ]
    assert [
        file.name for file in files if re.search(r"spec,\s+section|quantizer_base|anchors B", file.read_text())
    ] == []
