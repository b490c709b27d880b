"""GEMM shapes and tuner files (docs/reference, section 6)."""

import re

import pytest

from swin_quant.backends.fastertransformer.tuner import HEADER, Tuned, fastest, gemm_shapes, read_tuned, write_tuned
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.cli import main
from swin_quant.config import find_config, load_config
from swin_quant.models.geometry import read_geometry

LINE = "0 0 0 0 3 ### 1 25088 192 384 21 0 20 0 0 0 0 15 0.024"


@pytest.fixture(scope="module")
def tiny():
    return read_geometry(load_config(find_config("swin_tiny_patch4_window7_224")))


@pytest.fixture
def write(tmp_path):
    def go(*lines, name="igemm_config.in"):
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return go


def test_the_19_shapes_of_swin_t(tiny):
    shapes = gemm_shapes(tiny, 32)
    assert len(shapes) == 19
    m = 32 * 56 * 56
    assert [g.key for g in shapes[:5]] == [(1, m, 288, 96), (1, m, 96, 96), (1, m, 384, 96), (1, m, 96, 384),
                                           (1, m // 4, 192, 384)]  # fmt: skip
    assert shapes[-1].key == (1, 32 * 49, 768, 3072)
    with pytest.raises(UsageError, match="batch 0"):
        gemm_shapes(tiny, 0)


def test_what_is_written_is_read(tmp_path):
    entries = [Tuned(1, 10**6, 192, 384, *range(8), 0.024), Tuned(1, 1, 2, 3, *8 * [0], 999.999999)]
    write_tuned(tmp_path / "x.in", entries)
    assert read_tuned(tmp_path / "x.in") == {entry.key: entry for entry in entries}


def test_the_first_entry_of_a_shape_wins_in_a_file_and_the_fastest_of_several(write):
    slow, fast = LINE.replace("0.024", "0.9"), LINE.replace(" 21 ", " 22 ")
    table = read_tuned(write(HEADER, LINE, slow))
    assert [entry.exec_time for entry in table.values()] == [0.024]
    other = read_tuned(write(HEADER, slow, name="b.in"))
    third = read_tuned(write(HEADER, fast.replace("0.024", "0.02"), name="c.in"))
    assert [entry.algo_id for entry in fastest([other, third, table]).values()] == [22]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "first line"),
        (["n m k", LINE], "first line"),
        ([HEADER, LINE + " 1 2"], "line 2: has 15 columns after ###, not 13: more are written for cuBLAS 11.11"),
        ([HEADER, "", "0 0 0 0 3 1 2"], "line 3: must have 5 columns"),
        ([HEADER, LINE.replace("192", "x")], "line 2: holds what is not a number"),
        ([HEADER, LINE.replace("0 3 ###", "0 1 ###")], "line 2: is no INT8 GEMM"),
        ([HEADER, LINE.replace("0.024", "nan")], "line 2: is no INT8 GEMM"),
    ],
)
def test_files_that_would_be_misread(write, lines, says):
    with pytest.raises(SwinQuantError, match=says):
        read_tuned(write(*lines))


def test_the_command_lists_shapes_and_merges_files(write, tmp_path, capsys):
    words = ["show", "--cfg", "swin_tiny_patch4_window7_224", "--gemms", "32"]
    assert main([*words, "--tuned", str(write(HEADER, LINE)), "--write", str(tmp_path / "merged.in")]) == 0
    out = capsys.readouterr().out
    assert "19 shapes, 1 tuned" in out and re.search(r"21 +0\.024$", out, re.MULTILINE)
    assert (tmp_path / "merged.in").read_text().splitlines() == [HEADER, LINE + "000"]
    assert main([*words, "--write", str(tmp_path / "none.in")]) == 2
    assert "--write needs --tuned" in capsys.readouterr().err
