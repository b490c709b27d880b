"""tools/code_size.py: its counts are those of other programs."""

import runpy
import subprocess
from pathlib import Path

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
