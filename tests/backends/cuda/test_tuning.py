"""Tiles timed on a GPU: the launches and batches that they serve, and the kernels that do not take them."""

from dataclasses import astuple, replace

import pytest
from crosscompile import list_kernels
from fusions import with_fusions
from tune import tiles_to_try

from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import format_shape, tiles_for
from swin_quant.backends.cuda.spec import make_spec_from_config
from swin_quant.base.errors import SwinQuantError

BEST = Tiles(64, 32, 32, 2, 4)


def timed(launch, batches, tiles=BEST):
    """The table of one launch, timed at these batches."""
    return {format_shape(launch): {str(batch): [*astuple(tiles), 3.5] for batch in batches}}


@pytest.fixture(scope="module")
def launches(tiny_config):
    """make(batch) -> the launches of a tiny V1."""
    return lambda batch: build_program(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), batch).launches


def test_tiles_serve_the_launch_and_batches_near_that_which_was_timed(launches):
    """Up to four times larger or smaller."""
    table = timed(launches(8)[2], [8])
    found = {batch: tiles_for(launches(batch)[2], batch, table) for batch in (1, 2, 3, 8, 32, 33)}
    assert found == {1: None, 2: BEST, 3: BEST, 8: BEST, 32: BEST, 33: None}
    assert tiles_for(launches(8)[3], 8, table) is None
    several = {name: {**timed(launches(8)[2], [8])[name], "1": [1, 32, 32, 4, 1, 1, 1.0]} for name in table}
    assert tiles_for(launches(2)[2], 2, several).rows == 1 and tiles_for(launches(3)[2], 3, several) == BEST


def test_the_shape_of_a_launch_is_the_same_in_every_block_and_batch(launches):
    shapes = {(one.op, format_shape(one)) for batch in (1, 8) for one in launches(batch)}
    blocks = {one.name: format_shape(one) for one in launches(1)}
    assert len(shapes) == len(set(blocks.values())) < len(blocks)
    assert blocks["layers.0.blocks.0.mlp.fc1"] == blocks["layers.0.blocks.1.mlp.fc1"]
    assert blocks["layers.0.blocks.0.attn"] != blocks["layers.1.blocks.0.attn"]


@pytest.fixture(scope="module")
def of_both(tiny_config):
    """All that a tiny V1 and a tiny V2 may launch, single and fused."""
    every = []
    for kind, more in (("swin", {}), ("swinv2", {"PRETRAINED_WINDOW_SIZES": [0, 0]})):
        cfg = tiny_config(kind, EMBED_DIM=96, DEPTHS=[2, 1], NUM_HEADS=[3, 6], **more)
        every += with_fusions(build_program(make_spec_from_config(cfg), 8).launches)
    return every


@pytest.mark.parametrize(
    "op, sides, said",
    [
        ("norm_quantize", {"columns": 32}, "columns 32: 96 at least"),  # would compute a third of each row
        ("norm_quantize", {"columns": 0}, "columns 0: 96 at least"),
        ("merge_quantize", {"columns": 256}, "columns 256: 384 at least"),
        ("norm_residual", {"columns": 64}, "columns 64: 96 at least"),
        ("pool", {"columns": 128}, "columns 128: 192 at least"),
        ("patch_embed", {"inner": 4}, "inner 4: 12 at least"),
        ("gemm", {"columns": 0}, "columns 0: 1 at least"),
        ("gemm", {"inner": 16}, "inner 16: 32 at least"),
        ("attention", {"columns": 0}, "columns 0: 32 at least"),
        ("norm_gemm", {"inner": 64}, "inner 64: 96 must be whole tiles"),
        ("gemm_norm", {"inner": 64}, "inner 64: 96 must be whole tiles"),  # would read past the row
        ("gemm_norm", {"columns": 0}, "columns 0: 96 must be whole tiles"),
        ("attention_norm", {"inner": 64}, "inner 64: 96 must be whole tiles"),
        ("mlp", {"columns": 64}, "columns 64: 96 must be whole tiles"),
        ("mlp", {"inner": 256}, "inner 256: 384 must be whole tiles"),
    ],
)
def test_tiles_that_are_not_for_their_kernel_are_refused(of_both, op, sides, said):
    """As after an update of the kernels."""
    pytest.importorskip("triton")
    launch = next(one for one in of_both if one.op == op)
    tiles = replace(tiles_to_try(launch)[0], **sides)
    with pytest.raises(SwinQuantError, match=f"tiles of {op}: {said}: run .python tools/cuda/tune.py. again"):
        tiles_for(launch, 8, timed(launch, [8], tiles))


@pytest.mark.parametrize("arithmetic", ["cuda", "ft-mode1"])
def test_every_launch_says_whether_products_and_sums_are_rounded_as_one(tiny_config, arithmetic):
    """Triton's default differs between versions; FasterTransformer rounds products by themselves."""
    pytest.importorskip("triton")
    spec = replace(make_spec_from_config(tiny_config("swin", EMBED_DIM=64)), arithmetic=arithmetic)
    found = list_kernels(build_program(spec, 2).launches)
    apart = [call for call in found if dict(call.types).get("product_levels") == "fp32"]
    assert bool(apart) == (arithmetic != "cuda")
    for call in found:
        assert dict(call.options)["enable_fp_fusion"] is (call not in apart), call.name
