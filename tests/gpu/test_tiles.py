"""Tuning on a GPU: no candidate changes a kernel's results, and the fastest is no slower than the default."""

from functools import partial

import pytest
import torch
from crosscompile import compile_ahead
from fusions import with_fusions
from tune import best_tiles, filled, tiles_to_try

from swin_quant.backends.cuda.gpu import capability_here
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import make_kernel
from swin_quant.backends.cuda.spec import make_spec_from_config

MANY = 1 << 20  # programs, so that several windows a program are tried too


@pytest.mark.parametrize(
    "op", ["norm_quantize", "gemm", "attention", "norm_gemm", "gemm_norm", "attention_norm", "mlp"]
)
def test_candidates_compute_the_same_and_the_best_is_no_slower(cuda, tiny_config, op):
    launches = build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), 8).launches
    launch = next(one for one in with_fusions(launches) if one.op == op)
    kernel = make_kernel(launch, partial(filled, device=cuda))
    default, results = kernel.prepare().tiles, {}
    for tiles in tiles_to_try(launch, MANY):
        kernel.out.fill_(-77)
        kernel.launch(tiles)
        results[tiles] = kernel.out.clone()
    expected = results[default].float()
    step = 1.0 if results[default].dtype == torch.int8 else 0.02 * expected[expected.isfinite()].std().item()
    for result in results.values():  # sums in another order may cross a tie, rarely
        torch.testing.assert_close(result.float(), expected, rtol=5e-3, atol=step, equal_nan=True)
        assert (result == results[default]).float().mean() > 0.97
    best, us, before = best_tiles(launch, cuda)
    assert 0 < us <= before and best in results


def test_a_launch_knows_what_is_put_into_memory(cuda, tiny_config):
    """Its spills decide whether it gets all registers."""
    launches = build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=96)), 8).launches
    launch = next(one for one in launches if one.op == "norm_quantize")
    prepared = make_kernel(launch, partial(filled, device=cuda)).prepare(Tiles(64, 128))  # 64 values a thread
    assert [prepared.spilled({"maxnreg": registers}) > 0 for registers in (32, 255)] == [True, False]


def test_launches_find_what_was_compiled_ahead(cuda, tiny_config, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=96)), 3).launches
    report = compile_ahead(((one, None) for one in launches), capability_here(), 300, processes=4)
    assert report.done and not report.refused and not report.left
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **said: hits.append(said["cache_hit"]))
    for launch in launches:
        make_kernel(launch, partial(filled, device=cuda)).launch()
    torch.cuda.synchronize()
    assert hits and all(hits)
