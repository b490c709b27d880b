"""Counts of machine code: by hand, and of one real kernel."""

from hypothesis import given
from hypothesis import strategies as st
from sass import counted

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
