"""tools/cuda/tune.py with a stand-in for compiling and timing kernels; tests/gpu has both on a GPU."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import tune
from crosscompile import CompiledAhead
from tune import tiles_to_try

from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.backends.cuda.fusions import candidates
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import program_of
from swin_quant.backends.cuda.spec_from_policy import spec_for
from swin_quant.backends.cuda.tuning import TimedTiles, TunedFor, kernels_hash, read_tiles, shape_of, tiles_path
from swin_quant.cards.card import RunCard
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy
from swin_quant.score.jobs import JobFailed

HERE = TunedFor(kernels_hash(), "NVIDIA H200", "3.6.0")


@pytest.fixture(scope="module")
def network(tiny_model, tmp_path_factory):
    """The file of a micro model, and the shape and batch of each kernel that it runs for some batches."""
    model = tiny_model("swin", IMG_SIZE=8, DEPTHS=[1, 1], NUM_HEADS=[1, 2], WINDOW_SIZE=2)
    policy = load_policy("cuda")
    apply_policy(model, policy)
    calibrate(model, [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))])
    spec = spec_for(model, "int8")

    def kernels(*batches):
        lists = {batch: program_of(spec, batch).launches for batch in batches}
        all_of = [(shape_of(one), batch) for batch, found in lists.items() for one in (*found, *candidates(found))]
        return list(dict.fromkeys(all_of))

    folder = tmp_path_factory.mktemp("network")
    return export(model, RunCard("micro", {}, {}, policy=policy.to_dict()), folder, CudaOptions()).file, kernels


@pytest.fixture
def run(monkeypatch, capsys, caplog):
    """run(*words) -> the script's exit code, its output, and its errors and warnings."""

    def make(*words):
        caplog.clear()
        monkeypatch.setattr(sys, "argv", ["tune.py", *map(str, words)])
        code, said = 0, ""
        try:
            tune.main()
        except SystemExit as end:
            code, said = 1, str(end.code)
        except KeyboardInterrupt:
            code = 130
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=f"{shown.err}{caplog.text}{said}")

    return make


class InThisProcess:
    """Replaces the process, in which the tests' replacements would be missing."""

    def __init__(self, work):
        self.work = work

    def do(self, job, seconds):
        try:
            return self.work(job)
        except Exception as error:
            raise JobFailed(f"{type(error).__name__}: {error}") from error

    def close(self):
        pass


@pytest.fixture
def gpu(monkeypatch, network):
    """A stand-in GPU for `tune`. `timed`: the kernels it was given, in order; `at`: index of a kernel -> what happens
    there."""
    pytest.importorskip("triton")  # has the kernels' default tiles

    class Gpu:
        timed, at, compiled = [], {}, 0

    def compile_ahead(wanted, capability, seconds):
        Gpu.compiled = len({(shape_of(launch), launch.operands["out"].shape) for launch, _ in wanted})
        return CompiledAhead(Gpu.compiled, (), 0)

    def best_tiles(launch, batch, device):
        number = len(Gpu.timed)
        Gpu.timed.append((shape_of(launch), batch))
        if number in Gpu.at:
            raise Gpu.at[number]
        return TimedTiles(launch=shape_of(launch), batch=batch, tiles=tiles_to_try(launch)[0], us=10.0), 15.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {
        "check_gpu": lambda format: None,
        "check_launcher": lambda: None,
        "capability_here": lambda: 90,
        "here": lambda: HERE,
        "tiles_to_try": lambda launch: [Tiles(64)],
        "compile_ahead": compile_ahead,
        "best_tiles": best_tiles,
        "JobProcess": InThisProcess,
    }.items():
        monkeypatch.setattr(tune, name, value)
    yield Gpu
    tiles_path(network[0], HERE.gpu).unlink(missing_ok=True)


def held(file):
    """The shapes and batches that ran, in the order of a tiles file."""
    table = read_tiles(file, HERE).known
    entries = json.loads(file.read_text())["timed"]
    assert {(one["launch"], one["batch"]) for one in entries} == {
        (shape, batch) for shape in table for batch in table[shape]
    }
    return [(one["launch"], one["batch"]) for one in entries if one["tiles"]]


def test_without_a_gpu_it_says_so_in_a_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds none here" in run(tmp_path / "none.safetensors").err


def test_every_kernel_is_timed_batch_after_batch(run, network, gpu):
    """When time runs out, the first batches, by which fusions are chosen, then have all their times."""
    file, kernels = network
    done = run(file, "--batch", 8, 1)
    count = len(kernels(8, 1))
    assert done.code == 0 and gpu.timed == kernels(8, 1) == held(tiles_path(file, HERE.gpu)), done.err
    said = f"{count} kernels on NVIDIA H200: {10 * count} µs together, by default {15 * count}; 0 were timed before"
    assert done.out.startswith(f"{tiles_path(file, HERE.gpu)}: {said}")


def test_what_was_timed_before_an_interruption_is_kept_and_gone_on_from(run, network, gpu):
    file, kernels = network
    gpu.at = {3: KeyboardInterrupt()}
    assert run(file, "--batch", 1, 8).code == 130
    assert held(tiles_path(file, HERE.gpu)) == kernels(1)[:3]
    gpu.timed, gpu.at = [], {}
    done = run(file, "--batch", 1, 8)
    assert done.code == 0 and gpu.timed == kernels(1, 8)[3:] and gpu.compiled == len(gpu.timed)
    assert held(tiles_path(file, HERE.gpu)) == kernels(1, 8) and "; 3 were timed before" in done.out
    gpu.timed = []
    assert run(file, "--batch", 8, 4).code == 0 and gpu.timed == kernels(4)  # batches 8 and 1 keep their times
    assert held(tiles_path(file, HERE.gpu)) == kernels(1, 8, 4)
