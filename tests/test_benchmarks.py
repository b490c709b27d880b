"""What the benchmarks that need a GPU make of its results, here given by hand."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swin_quant.backends.cuda.kernels import gemm, patch_embed
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.loader import Batch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """The module of a script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        ({"int8": 0.5, "trace fp16": 4.0, "eager fp16": 3.0, "compile fp16": 1.0}, "2.00 (compile)"),
        ({"int8": 0.5, "eager fp16": 0.6, "compile fp16": 1.0}, "1.20 (eager)"),
        ({"int8": 0.5, "compile fp16": 1.5, "max-autotune fp16": 1.0}, "2.00 (max-autotune)"),
        ({"int8": 0.5, "trace fp16": 4.0, "eager fp16": 3.0}, "not measured"),  # who was to be beaten did not run
        ({"compile fp16": 1.0}, "-"),
    ],
)
def test_the_best_of_torch_is_named_or_not_claimed(benchmark, ms, said):
    script = benchmark("cuda_engine")
    head, line = script.table([script.Row("swin", 32, ms)])
    cells = dict(zip(*([cell.strip() for cell in row.split("|")] for row in (head.splitlines()[0], line)), strict=True))
    assert cells["x best torch fp16"] == said
    assert cells["x trace"] == ("8.00" if {"int8", "trace fp16"} <= set(ms) else "-")


def test_a_page_says_what_its_times_depend_on(benchmark, tmp_path, monkeypatch):
    script = benchmark("cuda_engine")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 575.51.03\necho 575.51.03\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    page = "\n".join(script.heading(script.Place("cpu"), None))
    for said in ("driver 575.51.03, ", f"torch {torch.__version__}, ", "triton ", "commit ", time.strftime("%F")):
        assert said in page
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert "driver unknown, " in "\n".join(script.heading(script.Place("cpu"), None))


def test_trace_is_also_timed_by_plain_calls(benchmark, tmp_path):
    script = benchmark("cuda_engine")
    job = script.Job("trace fp16", "swin_digits", 2)
    rows = {(job.model, job.batch): script.Row(job.model, job.batch, {"int8": 0.5})}
    here = SimpleNamespace(do=lambda job, seconds: script.measure(script.Place("cpu"), job))
    script.run([job], here, script.Report([], rows), tmp_path, time.monotonic() + 60)
    head, line = script.table(rows.values())
    cells = dict(zip(*(row.split(" | ") for row in (head.splitlines()[0], line)), strict=True))
    ratio = float(cells["trace fp16, plain calls ms"]) / 0.5
    assert float(cells["x trace, plain calls"]) == pytest.approx(ratio, abs=0.01)
    assert float(cells["trace fp16 ms"]) > 0


def test_torch_compile_of_each_swin_comes_before_what_takes_minutes(benchmark):
    script = benchmark("cuda_engine")
    jobs = list(dict.fromkeys(script.wanted(script.MODELS, [32, 1, 8, 64], "cuda")))
    first = jobs[: next(n for n, job in enumerate(jobs) if job.model.startswith("swinv2"))]
    assert {job.model for job in first if job.contender == "compile fp16" and job.batch == 32} == set(script.V1)
    slowest = next(n for n, job in enumerate(first) if job.contender == "max-autotune fp16")
    assert all(job.contender not in ("compile fp16", "int8") for job in first[slowest:])


def test_single_launches_find_nothing_in_the_cache(benchmark, monkeypatch):
    """Nor do they have zeros for pictures: what a launch reads was drawn, and as much of it as is beyond the cache."""
    script, gpu = benchmark("cuda_contenders"), SimpleNamespace(L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    program = script.fused_program(script.packed("swin_digits", "int8").spec, 2, None, script.NO_TILES)
    for launch in program.launches:
        copies = script.copies_of(launch, torch.device("cuda"))
        assert copies == script.MOST_COPIES or copies >= 3 and copies * launch.bytes_moved >= 2 * gpu.L2_cache_size
    read, compute = [], patch_embed.reference

    def noted(images, **more):
        read.append(images)
        compute(images, **more)

    monkeypatch.setattr(patch_embed, "reference", noted)
    lines = list(script.single_launches("swin_digits", 2, script.Place("cpu")))
    assert len(lines) == len(program.launches) + 3 and "Error" not in "".join(lines)
    assert read and all(images.float().std() > 0 for images in read)


@pytest.mark.parametrize("precision", ["int8", "float"])
def test_kernels_that_compute_something_else_are_not_timed(benchmark, monkeypatch, precision):
    script, kernel = benchmark("cuda_contenders"), gemm.reference
    place, images = script.Place("cpu"), torch.randn(3, *script.shape_of("swin_digits"))

    def timed():
        return script.engine("swin_digits", len(images), place, precision)

    timed()(images)

    def one_row_too_few(*args, out, **more):
        before = out.view(-1, out.shape[-1])[-1].clone()
        kernel(*args, out=out, **more)
        out.view(-1, out.shape[-1])[-1] = before

    monkeypatch.setattr(gemm, "reference", one_row_too_few)
    with pytest.raises(SwinQuantError, match="wrong logits, whose time is none: SQNR .* dB to the references', .* at"):
        timed()


def answering(labels):
    return lambda images: torch.nn.functional.one_hot(labels[images[:, 0, 0, 0].long()], 3).float()


@pytest.mark.parametrize(
    ("pictures", "flipped", "wrong"),
    [
        (200, 0, None),
        (200, 1, None),  # one picture is half a point
        (200, 2, "top-1 differs from the references' by -1.00 points: 0.50 at most"),
        (10_000, 2, None),
        (10_000, 3, "top-1 differs from the references' by -0.03 points: 0.02 at most"),
    ],
)
def test_a_gpu_that_answers_otherwise_is_told_of(benchmark, pictures, flipped, wrong):
    images = torch.arange(pictures).float()[:, None, None, None].expand(-1, 3, 1, 1)
    labels = torch.arange(pictures) % 3
    other = labels.clone()
    other[:flipped] = (other[:flipped] + 1) % 3
    batches = [Batch(images, labels, list(range(pictures)), [])]
    row, said = benchmark("cuda_accuracy").compared(answering(labels), answering(other), batches)
    assert said == (wrong or "") and row[0] == "100.00" and float(row[2]) == pytest.approx(-100 * flipped / pictures)
    assert (row[-1] == "equal") == (not flipped)
