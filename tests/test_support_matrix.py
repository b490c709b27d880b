"""docs/support.md agrees with the code's limits."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_page_is_what_the_limits_say():
    page = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["page"]()
    assert (ROOT / "docs" / "support.md").read_text() == page, "python scripts/support_matrix.py docs/support.md"
    assert "| best |" in page and "| no (" in page and "unfused" in page
