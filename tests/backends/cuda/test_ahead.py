"""Kernels that are compiled ahead lie where the launch looks for them."""

import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from swin_quant.backends.cuda import ahead
from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.cases import arguments_of, cases, kernel_module, tiled_cases
from swin_quant.backends.cuda.crosscompile import recorded
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.planning import spec_of_config
from swin_quant.backends.cuda.timing import filled, tiles_to_try

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def program(tiny_config):
    return program_of(spec_of_config(tiny_config("swin", EMBED_DIM=64)), 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def gpu_90(monkeypatch):
    """Triton's launches as far as its compiler, for a GPU that is not here."""
    from triton.backends.compiler import GPUTarget

    device = SimpleNamespace(
        get_current_device=lambda: 90,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", device)


def launch_of(program, op):
    return next(one for one in program.launches if one.op == op)


def test_what_is_compiled_ahead_is_what_a_launch_takes_from_the_cache(program, cache, gpu_90, monkeypatch):
    launch = launch_of(program, "pool")
    (call,) = tiled_cases([(launch, None)])
    assert ahead.compile_one(ahead._job(call), 90) == ""
    files = sorted(cache.rglob("*"))
    kernel, found = call.kernel, []
    run = type(kernel).run
    monkeypatch.setattr(
        type(kernel), "run", lambda self, *args, **rest: found.append(run(self, *args, **rest | {"warmup": True}))
    )
    kernel.device_caches.pop(90, None)
    try:
        kernel_module(launch).launch(**arguments_of(launch, partial(filled, device=torch.device("cpu"))))
    finally:
        kernel.device_caches.pop(90, None)
    assert found[0].metadata.num_warps == dict(call.options)["num_warps"]
    assert sorted(cache.rglob("*")) == files


def test_the_engine_launches_the_kernels_that_are_compiled_ahead(program, monkeypatch):
    from swin_quant.backends.cuda import binding

    monkeypatch.setattr(binding, "by_kernels", lambda device: True)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    bound = bind(program, tensors, dict.fromkeys(program.scalars, 0.25), torch.device("cpu"))
    with recorded() as calls:
        bound()
    assert calls == cases(program.launches)


NAMES = """
import sys
from swin_quant.backends.cuda.ahead import compile_one
from swin_quant.backends.cuda.kernels.jit import gemm, norm_gemm

jit = "swin_quant.backends.cuda.kernels.jit"
for name in sys.argv[1:]:
    assert compile_one((f"{jit}.{name}", name, ((), (), (), ())), 90)  # it has no types, which is told
print(gemm.gemm.cache_key, norm_gemm.norm_gemm.cache_key)
"""


@pytest.mark.slow
def test_the_names_in_the_cache_do_not_depend_on_what_a_process_compiles_first(cache):
    orders = (["gemm", "norm_gemm"], ["norm_gemm", "gemm"])
    one, other = (
        subprocess.run([sys.executable, "-c", NAMES, *order], check=True, capture_output=True, text=True).stdout
        for order in orders
    )
    assert one == other


@pytest.mark.slow
def test_processes_compile_and_what_is_refused_is_told(program, cache):
    pool, gemm = launch_of(program, "pool"), launch_of(program, "gemm")
    odd = Tiles(48, 32, 32)  # no power of two
    report = ahead.compile_ahead([(pool, None), (pool, None), (gemm, odd)], 80, 120, processes=2)
    assert (report.done, report.left) == (1, 0) and len(report.refused) == 1 and report.refused[0].startswith("gemm: ")
    assert list(cache.rglob("*.cubin"))


@pytest.mark.slow
def test_no_time_is_no_error(program, cache):
    report = ahead.compile_ahead([(launch_of(program, "gemm"), None)], 80, 0.0, processes=1)
    assert (report.done, report.refused, report.left) == (0, (), 1)


def test_an_interpreter_needs_no_compiler(program, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ahead.compile_ahead([(launch_of(program, "gemm"), None)], 80, 60).left == 0


def test_what_is_tried_begins_with_the_default(program):
    tried = tiles_to_try(launch_of(program, "gemm"))
    assert len(tried) == len(set(tried)) > 5
    assert tiled_cases([(launch_of(program, "gemm"), tried[0])]) == cases([launch_of(program, "gemm")])
