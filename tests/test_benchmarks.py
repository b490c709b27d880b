"""Benchmark scripts: each imports and has its help; rendered pages are those of their recorded rows."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(FOLDER.rglob("*.py"))


@pytest.fixture
def benchmark(monkeypatch):
    """A function that imports a script by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_at_most_twelve_scripts_of_4500_lines_and_25_files_of_results():
    started = [file for file in SCRIPTS if '__name__ == "__main__"' in file.read_text()]
    assert len(started) <= 12 and sum(len(file.read_text().splitlines()) for file in SCRIPTS) <= 4500
    assert {file.suffix for file in FOLDER.iterdir() if file.is_file()} == {".py"}
    assert len(list((FOLDER.parent / "docs" / "results").iterdir())) <= 25


def test_the_page_of_cpu_engines_and_the_measured_gains_are_those_of_its_data(benchmark):
    script = benchmark("cpu_page")
    assert script.page(script.read()) == script.PAGE.read_text()
    assert script.measured(script.read()) == script.MEASURED.read_text()


def test_pages_of_passes_come_from_their_tables(benchmark, tmp_path, monkeypatch):
    script = benchmark("passes")
    rows, planted = script.written(), script.written_planted()
    wanted = [key for key, _ in script.planted_rows(Path())]
    pages = {page.with_suffix(suffix) for page in (script.PAGE, script.PLANTED_PAGE) for suffix in (".md", ".csv")}
    before = {page.name: page.read_text() for page in pages}
    monkeypatch.setattr(script, "PAGE", tmp_path / "passes.md")
    monkeypatch.setattr(script, "PLANTED_PAGE", tmp_path / "planted.md")
    script.write(rows)  # among them passes that VARIANTS no longer has
    script.write_planted(planted, wanted)
    assert {name: (tmp_path / name).read_text() for name in before} == before
