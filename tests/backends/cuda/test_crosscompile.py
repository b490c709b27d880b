"""Kernels for GPUs that are not here: the record of a launch, the compiler's result, and kernels compiled ahead."""

import pytest
import torch
from crosscompile import compile_ahead, list_kernels, recorded

from swin_quant.backends.cuda import program as programs
from swin_quant.backends.cuda.kernels.kernel import without_spills
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import make_spec_from_config
from tests.backends.cuda.test_tuning import BEST, timed

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def product(a, w, out, rows, scale, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, n, k = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :], mask=(m < rows)[:, None], other=0)
    y = tl.load(w + n[:, None] * K + k[None, :])
    sums = tl.dot(x, y.T, out_dtype=tl.int32).to(tl.float32) * scale
    tl.store(out + m[:, None] * BN + n[None, :], sums.to(tl.float16), mask=(m < rows)[:, None])


def launch(rows, warps=4):
    a, w = (torch.empty(side, 64, dtype=torch.int8, device="meta") for side in (rows, 32))
    out = torch.empty(rows, 32, dtype=torch.float16, device="meta")
    product[(-(-rows // 64),)](a, w, out, rows, 0.5, K=64, BM=64, BN=32, num_warps=warps)


def test_a_launch_is_recorded_once_for_all_that_the_compiler_is_not_told():
    run = triton.JITFunction.run
    with recorded() as calls:
        launch(64)
        launch(128)  # its number of rows is divisible by 16 too
        launch(65)
        launch(64, warps=2)
    assert triton.JITFunction.run is run
    first, odd, narrow = calls
    assert dict(first.types) == dict(
        a="*i8", w="*i8", out="*fp16", rows="i32", scale="fp32", K="constexpr", BM="constexpr", BN="constexpr"
    )
    assert dict(first.constants) == dict(K=64, BM=64, BN=32) and dict(first.options) == {"num_warps": 4}
    assert "rows" in first.aligned and "rows" not in odd.aligned and dict(narrow.options) == {"num_warps": 2}


@pytest.mark.parametrize("own, all_registers, taken", [(0, 0, False), (4, 0, True), (4, 2, False)])
def test_a_kernel_has_all_registers_only_where_that_ends_its_spills(own, all_registers, taken):
    chosen = without_spills({"num_warps": 4}, lambda options: all_registers if "maxnreg" in options else own)
    assert chosen == {"num_warps": 4} | ({"maxnreg": 255} if taken else {})


@pytest.fixture(scope="module")
def program(tiny_config):
    return build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), 8)


def test_the_engine_launches_what_is_compiled_ahead_with_the_tiles_that_were_timed(program, monkeypatch):
    monkeypatch.setattr(programs, "by_kernels", lambda device: True)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    bound = program, tensors, dict.fromkeys(program.scalars, 0.25), torch.device("cpu")
    table = timed(program.launches[2], [8])
    for given, tiles in ((programs.NO_TILES, None), (table, BEST)):
        with recorded() as calls:
            programs.bind(*bound, given)()
        wanted = [(one, tiles if programs.format_shape(one) in table else None) for one in program.launches]
        assert calls == list_kernels(wanted)


@pytest.mark.nightly
def test_processes_compile_and_what_is_refused_is_told(program, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool, gemm = (next(one for one in program.launches if one.op == op) for op in ("pool", "gemm"))
    odd = Tiles(48, 32, 32)  # no powers of two
    report = compile_ahead([(pool, None), (pool, None), (gemm, odd)], 80, 120, processes=2)
    assert (report.done, report.left) == (1, 0) and len(report.refused) == 1 and report.refused[0].startswith("gemm: ")
    assert list(tmp_path.rglob("*.cubin"))
