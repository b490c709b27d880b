"""tools/code_size.py: its counts are those of other programs."""

import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "tools" / "code_size.py"))


def test_files_and_lines_are_those_that_wc_counts():
    found = SCRIPT["measure"]()
    for folder in ("swin_quant", "tests", "swin_quant/quant"):
        files = [str(file) for file in (ROOT / folder).rglob("*.py")]
        counted = subprocess.run(["cat", *files], capture_output=True, check=True).stdout.count(b"\n")
        assert found[f"{folder}: files, lines"] == f"{len(files):,}, {counted:,}"
    assert found["benchmarks: files, lines"].startswith(f"{len(list((ROOT / 'benchmarks').glob('*.py')))}, ")
    assert found["commands"] > 10


def test_a_function_is_as_long_as_it_is_written():
    source = "@cache\ndef one():\n    return 1\n\n\nclass A:\n    async def two(self): ...\n"
    assert sorted(SCRIPT["function_lengths"](source)) == [1, 2]


@pytest.mark.slow
def test_a_trace_counts_files_that_a_command_enters():
    found = SCRIPT["trace"]()
    assert len(found) == 2 and all(5 < count < 100 for count in found.values())


def test_an_object_that_holds_a_path_or_pixels_is_followed():
    path, pixels = "/a/b.pth", np.zeros((4, 3, 32, 32))
    held = SimpleNamespace(checkpoint=Path(path), images=pixels)
    for value, followed in ((path, True), (Path(path), True), (held, True), ("/a/c.pth", False), (pixels, False)):
        assert SCRIPT["is_followed"](value, path) == followed
    for value, followed in ((pixels, True), (held, True), (Image.new("RGB", (9, 9)), True), (pixels[..., :8], False)):
        assert SCRIPT["is_followed"](value, "") == followed
