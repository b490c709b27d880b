"""Kernels compiled ahead are found by the launch."""

import crosscompile
import pytest
import torch
from crosscompile import kernels_of, recorded

from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.spec import make_spec_from_config

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def program(tiny_config):
    return build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def launch_of(program, op):
    return next(one for one in program.launches if one.op == op)


def test_the_engine_launches_the_kernels_that_are_compiled_ahead(program, monkeypatch):
    from swin_quant.backends.cuda import binding

    monkeypatch.setattr(binding, "by_kernels", lambda device: True)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    bound = bind(program, tensors, dict.fromkeys(program.scalars, 0.25), torch.device("cpu"))
    with recorded() as calls:
        bound()
    assert calls == kernels_of(program.launches)


@pytest.mark.nightly
def test_processes_compile_and_what_is_refused_is_told(program, cache):
    pool, gemm = launch_of(program, "pool"), launch_of(program, "gemm")
    odd = Tiles(48, 32, 32)  # no powers of two
    report = crosscompile.compile_ahead([(pool, None), (pool, None), (gemm, odd)], 80, 120, processes=2)
    assert (report.done, report.left) == (1, 0) and len(report.refused) == 1 and report.refused[0].startswith("gemm: ")
    assert list(cache.rglob("*.cubin"))
