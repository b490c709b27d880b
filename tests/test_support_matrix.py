"""docs/support.md and README's table of backends agree with the code."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_page_is_what_the_limits_say():
    page = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["page"]()
    assert (ROOT / "docs" / "support.md").read_text() == page, "python scripts/support_matrix.py"
    assert "| best |" in page and "| no (" in page and "unfused" in page


def test_readme_lists_every_backend_as_the_code_describes_it():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))["readme"](text) == text
    assert all(f"| `{name}` | ONNX" in text for name in ("onnx", "openvino")), "a target for any CPU is there"
