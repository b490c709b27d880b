"""tools/cuda/tune.py with a stand-in for compiling and timing kernels; tests/gpu has both on a GPU."""

import sys
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
import tune
from crosscompile import CompiledAhead
from fusions import with_fusions
from jobs import JobFailed
from tune import read_times

from swin_quant.backends.cuda.export import CudaOptions, export
from swin_quant.backends.cuda.gpu import load_machine
from swin_quant.backends.cuda.kernels.tiles import Tiles
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import format_shape
from swin_quant.backends.cuda.spec import spec_for
from swin_quant.cards.card import RunCard
from swin_quant.quant.calibration import calibrate
from swin_quant.quant.policy import apply_policy, load_policy

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def network(tiny_model, tmp_path_factory):
    """The file of a micro model, and the shape and batch of each kernel that it runs for some batches."""
    model = tiny_model("swin", IMG_SIZE=8, DEPTHS=[1, 1], NUM_HEADS=[1, 2], WINDOW_SIZE=2)
    policy = load_policy("cuda")
    apply_policy(model, policy)
    calibrate(model, [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))])
    spec = spec_for(model, "int8")

    def kernels(*batches):
        lists = {batch: build_program(spec, batch).launches for batch in batches}
        all_of = [(format_shape(one), batch) for batch, found in lists.items() for one in with_fusions(found)]
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
        Gpu.compiled = len({(format_shape(launch), launch.operands["out"].shape) for launch, _ in wanted})
        return CompiledAhead(Gpu.compiled, (), 0)

    def best_tiles(launch, device):
        number = len(Gpu.timed)
        Gpu.timed.append(format_shape(launch))
        if number in Gpu.at:
            raise Gpu.at[number]
        return Tiles(64), 10.0, 15.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    for name, value in {
        "check_gpu": lambda format: None,
        "check_launcher": lambda: None,
        "capability_here": lambda: 90,
        "tiles_to_try": lambda launch: [Tiles(64)],
        "compile_ahead": compile_ahead,
        "best_tiles": best_tiles,
        "JobProcess": InThisProcess,
    }.items():
        monkeypatch.setattr(tune, name, value)
    return Gpu


def shapes(kernels):
    return [shape for shape, _ in kernels]


def test_without_a_gpu_it_says_so_in_a_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds none here" in run(tmp_path / "none.safetensors").err


def test_measured_times_decide_the_fusions_of_their_widths(run, network, gpu, tmp_path):
    """All kernels take the same time here, so the fewest are best; one that a GPU refused is never chosen."""
    file, kernels = network
    mine, shipped = tmp_path / "mine.yaml", load_machine("h200").gpu.fusions["int8"]
    refused = shapes(kernels(8)).index(next(shape for shape in shapes(kernels(8)) if shape.startswith("mlp ")))
    gpu.at = {refused: RuntimeError("spills")}
    done = run(file, "--batch", 8, "--machine", mine)
    assert done.code == 0 and "not timed: RuntimeError: spills" in done.err and "1 ran with no tiles" in done.out
    found = load_machine(str(mine)).gpu.fusions["int8"]
    widths = {title: set(found[title]) - set(shipped[title]) for title in shipped}
    assert widths["one MLP"] == {"32", "64"} and found["one MLP"]["32"] == [] != found["one MLP"]["64"]
    assert widths["norm1 into qkv"] and all(found["norm1 into qkv"][width] for width in widths["norm1 into qkv"])
    assert all(found[title][width] == shipped[title][width] for title in shipped for width in shipped[title])


@pytest.mark.nightly
def test_kernels_are_timed_batch_after_batch_and_an_interruption_is_gone_on_from(run, network, gpu, tmp_path):
    """When time runs out, the first batches, by which fusions are chosen, then have all their times."""
    file, kernels = network
    mine, time = tmp_path / "mine.yaml", [*astuple(Tiles(64)), 10.0]
    gpu.at = {3: KeyboardInterrupt()}
    assert run(file, "--batch", 8, 1, "--machine", mine).code == 130
    assert read_times(mine) == dict.fromkeys(kernels(8)[:3], time)
    gpu.timed, gpu.at = [], {}
    done, count = run(file, "--batch", 8, 1, "--machine", mine), len(kernels(8, 1)) - 3
    assert done.code == 0 and gpu.timed == shapes(kernels(8, 1)[3:]) and gpu.compiled == count, done.err
    assert read_times(mine) == dict.fromkeys(kernels(8, 1), time)
    said = f"{count} kernels on {H200}: {10 * count} µs together, by default {15 * count}; 3 were timed before"
    assert done.out.startswith(f"{mine}: {said}")
    assert f"on {H200}, triton" in mine.read_text() and "rows, columns, inner" in mine.read_text()
