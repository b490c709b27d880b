"""Counts of machine code: by hand, of one real kernel, and in their file."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.cuda import counts
from swin_quant.backends.cuda.counts import (
    CountsFile,
    KernelCounts,
    count,
    key_of,
    read_counts,
    write_counts,
)
from swin_quant.backends.cuda.crosscompile import kernel_of
from swin_quant.backends.cuda.sass import counted
from swin_quant.base.errors import SwinQuantError
from tests.backends.cuda.conftest import launches_of

LOOP = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   NOP ;
.L_x_0:
        /*0030*/                   FFMA R8, R4, R4, R8 ;
        /*0040*/                   MUFU.EX2 R9, R8 ;
        /*0050*/                   IMMA.16832.S8.S8 R12, R16.ROW, R20.COL, R12 ;
        /*0060*/                   ISETP.GE.AND P0, PT, R9, 0x3, PT ;
        /*0070*/              @!P0 BRA `(.L_x_0) ;
        /*0080*/               @P1 EXIT ;
        /*0090*/                   STG.E desc[UR4][R2.64], R8 ;
        /*00a0*/                   EXIT ;
.L_x_1:
        /*00b0*/                   BRA `(.L_x_1);
        /*00c0*/                   NOP ;
"""


def launch_of(layer):
    return next(one for one in launches_of("swin_tiny_patch4_window7_224") if one.name == layer)


@given(st.integers(1, 50))
def test_loops_count_as_often_as_they_run(trips):
    found = counted(LOOP, (trips,), 80)
    assert found.issue == 2 + 5 * trips + 3
    assert (found.alu, found.fma, found.special) == (2 * trips, 2 * trips, 8 * trips)
    assert found.memory == 4 * 4 + 4  # 16 bytes a thread, then 4
    assert found.operations == 2 * 16 * 8 * 32 * trips
    assert found.tensor == 8 * trips  # 1024 operations a clock of a scheduler


def test_products_of_four_warps_are_a_quarter_each():
    of_group = counted("/*0000*/ IGMMA.64x128x32.S8.S8 R24, gdesc[UR4], R24, gsb0 ;", (), 90)
    half = counted("/*0000*/ HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0 ;", (), 90)
    assert of_group.operations == 2 * 64 * 128 * 32 // 4 == 2 * half.operations
    assert of_group.tensor == half.tensor == 64


@given(st.integers(1, 40))
def test_a_chain_takes_the_latency_of_each_link(links):
    chain = "".join(f"/*{at:04x}*/ FADD R1, R1, R2 ;\n" for at in range(links))
    apart = "".join(f"/*{at:04x}*/ FADD R{3 + at}, R1, R2 ;\n" for at in range(links))
    assert counted(chain, (), 90).serial == 5 * (links - 1) + 1
    assert counted(apart, (), 90).serial == links


def test_copies_are_waited_for_by_group():
    copy = "/*0000*/ LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;\n/*0010*/ LDGDEPBAR ;\n"
    assert counted(copy * 2 + "/*0020*/ DEPBAR.LE SB0, 0x1 ;", (), 90).serial < 310
    assert counted(copy + "/*0020*/ DEPBAR.LE SB0, 0x0 ;" + copy, (), 90).serial > 300
    assert counted(copy, (), 90).serial < 10


def test_a_real_kernel_has_the_products_of_its_launch():
    pytest.importorskip("triton")
    launch = launch_of("layers.3.blocks.0.attn.qkv")
    rows = 13 * 128  # 1568 in whole tiles
    found = count(launch, 90)
    assert found.counts.operations * found.warps * prod(kernel_of(launch).prepare().grid) == 2 * rows * 2304 * 768
    assert found.counts.issue < found.counts.serial and found.registers <= 255


def test_kernels_of_maps_of_other_sizes_share_counts():
    keys = {
        layer: key_of(kernel_of(launch_of(f"layers.{layer}")).prepare(), 90)
        for layer in ("0.blocks.0.attn.qkv", "0.blocks.1.attn.qkv", "1.blocks.0.attn.qkv", "0.blocks.0.mlp.fc1")
    }
    assert keys["0.blocks.0.attn.qkv"] == keys["0.blocks.1.attn.qkv"] and len(set(keys.values())) == 3
    plain, shifted = (kernel_of(launch_of(f"layers.0.blocks.{block}.attn")).prepare() for block in (0, 1))
    assert key_of(plain, 90) != key_of(shifted, 90) != key_of(shifted, 80)
    assert key_of(plain, 90) == key_of(replace(plain, constants={**plain.constants, "SIDE": 112}), 90)


def test_a_file_keeps_counts(tmp_path):
    launch, file = launch_of("layers.0.blocks.0.attn.qkv"), tmp_path / "counts.csv"
    found = KernelCounts(counted(LOOP, (3,), 90), 8, 96, 1024)
    write_counts(file, CountsFile("3.7.1", {key_of(kernel_of(launch).prepare(), 90): found}))
    kept = read_counts(file)
    assert kept.triton == "3.7.1" and kept.of(launch, 80) is None
    again = kept.of(launch, 90)
    assert (again.warps, again.registers, again.shared) == (8, 96, 1024)
    assert again.counts.issue == found.counts.issue and abs(again.counts.serial - found.counts.serial) < 1
    file.write_text("# triton 3.7.1\nkey,issue\nabc,1\n")
    with pytest.raises(SwinQuantError, match=r"counts\.csv: is no file of counts .*: write it again"):
        read_counts(file)
    assert read_counts(tmp_path / "none.csv").known == {}


def test_a_kernel_is_known_by_the_functions_that_it_calls(tmp_path, monkeypatch):
    """Its counts hold until one of them changes; those of other kernels in the same module do not matter."""
    shared = "LARGEST = tl.constexpr(7.0)\ndef used(x):\n    return x + LARGEST\ndef other(x):\n    return x\n"
    kernel = f'from {counts._PACKAGE}.shared import other, used\ndef mine(x):\n    """Says."""\n    return used(x)\n'
    seen = []
    for changed in (
        (shared, kernel),
        (shared.replace("return x\n", "return 2 * x\n"), kernel.replace("Says", "# says\n    Said")),
        (shared.replace("7.0", "8.0"), kernel),
        (shared, kernel.replace("used(x)", "used(2 * x)")),
    ):
        for name, text in zip(("shared", "kernel"), changed, strict=True):
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setattr(counts, "_JIT", tmp_path)
        counts._source.cache_clear(), counts._module.cache_clear()
        seen.append(counts._source("kernel", "mine"))
    counts._source.cache_clear(), counts._module.cache_clear()
    assert seen[0] == seen[1] and len(set(seen)) == 3
