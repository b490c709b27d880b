"""The site: links of documents, and a strict build, which fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import swin_quant

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def site(tmp_path):
    """The folder of the built site; CI has built it (BUILT), as strictly as here."""
    for needed in ("material", "mkdocstrings"):
        pytest.importorskip(needed, reason="the extra docs is not installed")
    if "BUILT" in os.environ:
        return ROOT / "build" / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "site"


def test_the_site_is_built_without_a_warning_and_fetches_nothing(site):
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert {"index.html", "quantize.html", "support.html", "api.html", "commands.html"} <= set(pages)
    fetched = re.compile(r"""<(?:script|img|link)[^>]+(?:src|href)=["']?https?://""")
    assert [name for name, page in pages.items() if fetched.search(page)] == []
    assert "<td>openvino</td>" in pages["accuracy.html"], "a table from its CSV"
    assert all(f"sq.{name}" in pages["api.html"] for name in swin_quant._FACE)


def test_every_page_of_the_navigation_is_one():
    made = {"index.md", "changelog.md", "contributing.md", "security.md", "commands.md", "api.md"}
    names = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert [name for name in names if name not in made and not (ROOT / "docs" / name).is_file()] == []
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= set(names), "a document that nobody finds"


def test_every_table_of_results_is_found_from_their_page():
    folder = ROOT / "docs" / "results"
    listed = re.findall(r"\]\(([\w.]+)\)", (folder / "README.md").read_text())
    assert {file.name for file in folder.iterdir()} - {"README.md"} == set(listed)
