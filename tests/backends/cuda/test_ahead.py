"""Kernels compiled ahead are found by the launch."""

from functools import partial
from types import SimpleNamespace

import crosscompile
import pytest
import torch
from crosscompile import compiled, kernels_of, kernels_with_tiles, recorded, usage
from estimates import LIMITS
from tune import filled

from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.program import kernel_of
from swin_quant.backends.cuda.spec import spec_of_config

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def program(tiny_config):
    return program_of(spec_of_config(tiny_config("swin", EMBED_DIM=64)), 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """gpu(90) -> a list of launched machine codes from now on: Triton's driver of a GPU that is not here."""
    from triton.backends.compiler import GPUTarget

    def make(capability):
        launched = []

        def load(name, code, shared, device):
            registers, spilled = usage(SimpleNamespace(asm={"cubin": code}))
            return "module", code, registers, spilled // 4, 1024

        driver = SimpleNamespace(
            get_current_device=lambda: capability,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            launcher_cls=lambda source, metadata: lambda x, y, z, stream, function, *rest: launched.append(function),
            utils=SimpleNamespace(
                load_binary=load,
                unload_module=lambda module: None,
                get_device_properties=lambda _: {"max_shared_mem": LIMITS[capability].shared_program},
            ),
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)
        return launched

    return make


def launch_of(program, op):
    return next(one for one in program.launches if one.op == op)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("op", ["pool", "attention"])
def test_what_is_compiled_ahead_is_what_a_launch_takes_from_the_cache(tiny_config, cache, gpu, op, capability):
    """V2's attention without a shift, in float8, spills on 10.0 with the registers that Triton 3.7's ptxas chooses."""
    of_eight = {"EMBED_DIM": 96, "DEPTHS": [1], "NUM_HEADS": [3], "WINDOW_SIZE": 8, "PRETRAINED_WINDOW_SIZES": [0]}
    launch = launch_of(program_of(spec_of_config(tiny_config("swinv2", **of_eight), "fp8"), 2), op)
    (call,) = kernels_with_tiles([(launch, None)])
    assert crosscompile.compile_one(call, capability) == ""
    files = sorted(cache.rglob("*"))
    launched = gpu(capability)
    call.kernel.device_caches.pop(capability, None)
    try:
        kernel_of(launch, partial(filled, device=torch.device("cpu"))).launch()
    finally:
        call.kernel.device_caches.pop(capability, None)
    assert sorted(cache.rglob("*")) == files
    source, made = compiled(call, capability)
    assert launched == [made.asm["cubin"]] and usage(made)[1] == 0
    by_its_own = triton.compile(
        source, target=triton.runtime.driver.active.get_current_target(), options=dict(call.options)
    )
    assert (made.metadata.maxnreg == 255) == (usage(by_its_own)[1] > 0)


def test_the_engine_launches_the_kernels_that_are_compiled_ahead(program, monkeypatch):
    from swin_quant.backends.cuda import binding

    monkeypatch.setattr(binding, "by_kernels", lambda device: True)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    bound = bind(program, tensors, dict.fromkeys(program.scalars, 0.25), torch.device("cpu"))
    with recorded() as calls:
        bound()
    assert calls == kernels_of(program.launches)


@pytest.mark.slow
def test_processes_compile_and_what_is_refused_is_told(program, cache):
    pool, gemm = launch_of(program, "pool"), launch_of(program, "gemm")
    odd = Tiles(48, 32, 32)  # no powers of two
    report = crosscompile.compile_ahead([(pool, None), (pool, None), (gemm, odd)], 80, 120, processes=2)
    assert (report.done, report.left) == (1, 0) and len(report.refused) == 1 and report.refused[0].startswith("gemm: ")
    assert list(cache.rglob("*.cubin"))
