"""Tiles timed elsewhere: their file, where it holds, and the candidates."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from crosscompile import kernels_of, recorded
from tune import BATCHES, tiles_to_try

from swin_quant.backends.cuda import binding, tuning
from swin_quant.backends.cuda.binding import bind
from swin_quant.backends.cuda.fusions import with_fusions
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.spec import spec_of_config
from swin_quant.backends.cuda.tuning import TimedTiles, TunedFor, read_tiles, shape_of, tiles_beside, tiles_path
from swin_quant.base.errors import SwinQuantError

HERE = TunedFor("0" * 64, "NVIDIA H200", "3.6.0")
BEST = Tiles(64, 32, 32, 2, 4)


@pytest.fixture(scope="module")
def launches(tiny_config):
    """make(batch) -> the launches of a tiny V1."""
    return lambda batch: program_of(spec_of_config(tiny_config("swin", EMBED_DIM=64)), batch).launches


@pytest.fixture
def written(launches, tmp_path):
    """The file of one launch, timed at batch 8, beside an artifact; the launch."""
    launch = launches(8)[2]
    path = tiles_path(tmp_path / "my_int8_cuda.safetensors", HERE.gpu)
    tuning.write_tiles(path, HERE, [TimedTiles(launch=shape_of(launch), batch=8, tiles=BEST, us=3.5)])
    return path, launch


def test_tiles_serve_the_launch_and_batches_near_that_which_was_timed(written, launches):
    """Up to four times larger or smaller."""
    table = read_tiles(written[0], HERE)
    found = {batch: table.tiles_for(launches(batch)[2], batch) for batch in (1, 2, 3, 8, 32, 33)}
    assert found == {1: None, 2: BEST, 3: BEST, 8: BEST, 32: BEST, 33: None}
    assert table.tiles_for(launches(8)[3], 8) is None


def test_every_batch_between_those_that_tune_times_takes_the_nearer_one(launches):
    launch = launches(1)[2]
    table = tuning.TileTable({shape_of(launch): {batch: (Tiles(batch), float(batch)) for batch in BATCHES}})
    taken = {batch: table.tiles_for(launch, batch).rows for batch in range(1, 65)}
    assert {batch for batch in taken if taken[batch] == 1} == {1, 2}  # 3 is 3 times 1, and 8 is 2.7 times 3
    assert {batch for batch in taken if taken[batch] == 8} == set(range(3, 16))
    assert {table.times_of([launch], batch)[shape_of(launch)] for batch in (1, 3, 64)} == {1.0, 8.0, 32.0}


def test_the_shape_of_a_launch_is_the_same_in_every_block_and_batch(launches):
    shapes = {(one.op, shape_of(one)) for batch in (1, 8) for one in launches(batch)}
    blocks = {one.name: shape_of(one) for one in launches(1)}
    assert len(shapes) == len(set(blocks.values())) < len(blocks)
    assert blocks["layers.0.blocks.0.mlp.fc1"] == blocks["layers.0.blocks.1.mlp.fc1"]
    assert blocks["layers.0.blocks.0.attn"] != blocks["layers.1.blocks.0.attn"]


@pytest.mark.parametrize(
    "other, said",
    [
        ({"gpu": "NVIDIA A100"}, "was tuned on gpu NVIDIA H200, not on NVIDIA A100 with triton 3.6.0"),
        ({"triton": "3.7.1"}, "was tuned on triton 3.6.0"),
        ({"kernels": "1" * 64}, "was tuned for other kernels than these"),
    ],
)
def test_tiles_of_another_place_are_refused_and_left_aside_by_the_engine(written, caplog, other, said):
    path, _ = written
    place = replace(HERE, **other)
    with pytest.raises(SwinQuantError, match=said):
        read_tiles(path, place)
    artifact = path.with_name("my_int8_cuda.safetensors")
    with caplog.at_level(logging.WARNING):
        assert tiles_beside(artifact, place, []) is tuning.NO_TILES
    assert said in caplog.text and "default tiles are used" in caplog.text
    assert tiles_beside(artifact, HERE, []).known and not tiles_beside(path.with_name("none.pth"), HERE, []).known


def entry(batch=1, **tiles):
    """A file's change to one entry with these tiles, by default of one row."""
    return {"timed": [{"launch": "x", "batch": batch, "tiles": tiles or {"rows": 1}, "us": 1.0}]}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"schema": "swin-quant/tiles/0"}, "is no tiles file of this version"),
        (entry(batch=0), r"timed\[0\].batch is 0"),
        (entry(lines=1), r"timed\[0\].tiles"),
        (entry(rows="1"), r"timed\[0\].tiles.rows"),
        (entry(rows=48), "must be powers of two"),
        (entry(rows=64, warps=64), "warps at most 32"),
        (entry(rows=64, windows=3), "warps and windows"),
        (entry(rows=64, windows=0), "warps and windows"),
    ],
)
def test_a_damaged_file_is_one_line(written, change, said):
    path, _ = written
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SwinQuantError, match=said):
        read_tiles(path, HERE)


@pytest.fixture(scope="module")
def of_both(tiny_config):
    """All that a tiny V1 and a tiny V2 may launch, single and fused."""
    every = []
    for kind, more in (("swin", {}), ("swinv2", {"PRETRAINED_WINDOW_SIZES": [0, 0]})):
        cfg = tiny_config(kind, EMBED_DIM=96, DEPTHS=[2, 1], NUM_HEADS=[3, 6], **more)
        every += with_fusions(program_of(spec_of_config(cfg), 8).launches)
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
def test_tiles_that_are_not_for_their_kernel_are_refused(of_both, tmp_path, caplog, op, sides, said):
    pytest.importorskip("triton")
    launch = next(one for one in of_both if one.op == op)
    tiles = replace(tiles_to_try(launch)[0], **sides)
    path = tiles_path(tmp_path / "my_int8_cuda.safetensors", HERE.gpu)
    tuning.write_tiles(path, HERE, [TimedTiles(launch=shape_of(launch), batch=8, tiles=tiles, us=3.5)])
    with pytest.raises(SwinQuantError, match=f"{path.name}: .*{op}: {said}: run .python tools/cuda/tune.py. again"):
        read_tiles(path, HERE, of_both)
    with caplog.at_level(logging.WARNING):
        assert tiles_beside(tmp_path / "my_int8_cuda.safetensors", HERE, of_both) is tuning.NO_TILES
    assert said in caplog.text and caplog.text.count("\n") == 1


def test_the_first_file_that_holds_here_is_taken(written, launches, caplog):
    """A file of this GPU from before an update, or of another GPU, came before a good one."""
    path, launch = written
    artifact = path.with_name("my_int8_cuda.safetensors")
    for name, place in (("nvidia-h200", replace(HERE, kernels="1" * 64)), ("a100", replace(HERE, gpu="A100"))):
        tuning.write_tiles(tiles_path(artifact, name), place, [])
    other = [TimedTiles(launch=shape_of(launch), batch=8, tiles=BEST, us=3.5)]
    for good in (tiles_path(artifact, ""), tiles_path(artifact, "mine")):
        tuning.write_tiles(good, HERE, other)
        with caplog.at_level(logging.WARNING):
            assert tiles_beside(artifact, HERE, launches(8)).tiles_for(launch, 8) == BEST
        assert not caplog.records
        good.unlink()
    assert tiles_beside(artifact, HERE, launches(8)).known == {}
    assert "was tuned for other kernels" in caplog.text and len(caplog.records) == 1


def test_the_hash_is_that_of_all_kernels(tmp_path, monkeypatch):
    before = tuning.kernels_hash()
    assert before == tuning.kernels_hash() and len(before) == 64
    (tmp_path / "kernels" / "jit").mkdir(parents=True)
    (tmp_path / "kernels" / "jit" / "one.py").write_text("x = 1")
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "tuning.py"))
    one = tuning.kernels_hash()
    (tmp_path / "kernels" / "jit" / "one.py").write_text("x = 2")
    assert len({before, one, tuning.kernels_hash()}) == 3


@pytest.mark.parametrize("arithmetic", ["cuda", "ft-mode1"])
def test_every_launch_says_whether_products_and_sums_are_rounded_as_one(tiny_config, arithmetic):
    """Triton's default differs between versions; FasterTransformer rounds products by themselves."""
    pytest.importorskip("triton")
    spec = replace(spec_of_config(tiny_config("swin", EMBED_DIM=64)), arithmetic=arithmetic)
    found = kernels_of(program_of(spec, 2).launches)
    apart = [call for call in found if dict(call.types).get("product_levels") == "fp32"]
    assert bool(apart) == (arithmetic != "cuda")
    for call in found:
        assert dict(call.options)["enable_fp_fusion"] is (call not in apart), call.name


def test_the_engine_launches_kernels_with_the_tiles_that_were_timed(written, tiny_config, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(binding, "by_kernels", lambda device: True)
    program = program_of(spec_of_config(tiny_config("swin", EMBED_DIM=64)), 8)
    tensors = {name: torch.empty(ref.shape, dtype=ref.dtype) for name, ref in program.packed.items()}
    scalars = dict.fromkeys(program.scalars, 0.5)
    chosen = []
    for table in (tuning.NO_TILES, read_tiles(written[0], HERE)):
        with recorded() as calls:
            bind(program, tensors, scalars, torch.device("cpu"), table).calls[2]()
        chosen.append((dict(calls[0].constants)["BM"], dict(calls[0].options)["num_stages"]))
    assert chosen[1] == (BEST.rows, BEST.stages) != chosen[0]
