"""The benchmarks that need a GPU, on results given here by hand."""

import csv
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swin_quant.backends.cuda.kernels.gemm import GemmKernel
from swin_quant.backends.cuda.kernels.patch_embed import PatchEmbedKernel
from swin_quant.base.errors import SwinQuantError
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.data.loader import Batch
from swin_quant.data.sources import open_pictures
from swin_quant.quant.policy import dequantize, quantize
from swin_quant.score.jobs import JobFailed

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """A script's module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return __import__


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        ({"int8": 0.5, "trace fp16": 4.0, "eager fp16": 3.0, "compile fp16": 1.0}, "2.00 (compile)"),
        ({"int8": 0.5, "eager fp16": 0.6, "compile fp16": 1.0}, "1.20 (eager)"),
        ({"int8": 0.5, "compile fp16": 1.5, "max-autotune fp16": 1.0}, "2.00 (max-autotune)"),
        ({"int8": 0.5, "compile fp16": 1.5, "max-autotune bf16": 0.8, "torchao fp8": 0.75}, "1.50 (torchao fp8)"),
        ({"int8": 0.5, "trace fp16": 4.0, "eager fp16": 3.0}, "not measured"),  # the one to beat did not run
        ({"compile fp16": 1.0}, "-"),
    ],
)
def test_the_best_of_torch_is_named_or_not_claimed(benchmark, ms, said):
    script = benchmark("cuda_report")
    head, line = script.table([script.Row("swin", 32, ms)])
    cells = dict(zip(*([cell.strip() for cell in row.split("|")] for row in (head.splitlines()[0], line)), strict=True))
    assert cells["x best torch"] == said
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


def test_a_rerun_of_some_networks_keeps_the_other_rows_and_sections(benchmark, tmp_path, monkeypatch):
    script, page, work = benchmark("swins"), tmp_path / "page.md", tmp_path / "work"
    work.mkdir()

    def rerun(network, decibels):
        cells = [network, *[""] * (len(script.COLUMNS) - 3), decibels, ""]
        (work / f"{network}.json").write_text(json.dumps(cells))  # as an earlier run left it
        monkeypatch.setattr("sys.argv", ["swins.py", network, "--work", str(work), "--output", str(page)])
        script.main()

    rerun("Swinv2", "20.0")
    benchmark("pages").place(page, script.HEADING, "Tasks", "| task | OpenVINO |\n|---|---|\n| detector | 42.2 |\n")
    rerun("Swin", "30.0")
    rerun("Swinv2", "25.0")
    rows = list(csv.DictReader((tmp_path / "page.csv").open()))
    assert [(row["network"], row["ONNX Runtime"]) for row in rows[:2]] == [("Swin", "30.0"), ("Swinv2", "25.0")]
    assert [(row["task"], row["OpenVINO"]) for row in rows[2:]] == [("detector", "42.2")]
    assert [line for line in page.read_text().splitlines() if line.startswith("## ")] == ["## Networks", "## Tasks"]


@pytest.mark.slow
def test_trace_is_also_timed_by_plain_calls(benchmark, tmp_path):
    script = benchmark("cuda_engine")
    job = script.Job("trace fp16", "swin_digits", 2)
    rows = {(job.model, job.batch): script.Row(job.model, job.batch, {"int8": 0.5})}
    here = SimpleNamespace(do=lambda job, seconds: script.measure(script.Place("cpu"), job))
    script.run([job], here, script.Report([], rows), tmp_path, time.monotonic() + 60)
    head, line = benchmark("cuda_report").table(rows.values())
    cells = dict(zip(*(row.split(" | ") for row in (head.splitlines()[0], line)), strict=True))
    ratio = float(cells["trace fp16, plain calls ms"]) / 0.5
    assert float(cells["x trace, plain calls"]) == pytest.approx(ratio, abs=0.01)
    assert float(cells["trace fp16 ms"]) > 0


def test_what_the_goals_compare_comes_first_and_what_takes_minutes_last(benchmark):
    script, batches = benchmark("cuda_engine"), [32, 1, 8, 64]
    jobs = list(dict.fromkeys(script.wanted(script.MODELS, batches, "cuda")))
    first = jobs[: next(n for n, job in enumerate(jobs) if job.candidate not in script.QUICK)]
    assert {(job.model, job.batch) for job in first} == {(model, batch) for model in script.V1 for batch in (32, 1)}
    of_v1 = jobs[: next(n for n, job in enumerate(jobs) if job.model.startswith("swinv2"))]
    assert {job.model for job in of_v1 if job.candidate == "compile fp16" and job.batch == 32} == set(script.V1)
    slowest = next(n for n, job in enumerate(of_v1) if job.candidate == "max-autotune fp16")
    assert all(job.candidate not in ("compile fp16", "int8") for job in of_v1[slowest:])
    compiling = next(n for n, job in enumerate(jobs) if job.candidate == "compile fp16")
    assert {job.candidate for job in jobs[:compiling]} >= {"launches int8", "launches fp16"}
    for name in (*script.QUICK, "compile fp16", "max-autotune fp16", "max-autotune bf16", "eager tf32", "eager fp32"):
        asked = {(job.model, job.batch) for job in jobs if job.candidate == name}
        assert asked == {(model, batch) for model in script.MODELS for batch in batches}


@pytest.fixture
def two_runs(benchmark, tmp_path):
    """The script, the jobs of two models, and a function that makes the report of another run in a folder."""
    script = benchmark("cuda_engine")
    models, names = ("swin", "swinv2"), ("int8", "trace fp16", "launches int8")
    jobs = [script.Job(name, model, 32) for model in models for name in names]

    def report(**made_with):
        rows = {(model, 32): script.Row(model, 32) for model in models}
        return script.Report(["# A GPU", ""], rows, {"gpu": "H200", "sources": "abc"} | made_with)

    return script, jobs, report, tmp_path


def working(wrong=()):
    """A process that needs no time: 2 ms each, lines for launches."""

    def do(job, seconds):
        if job.candidate in wrong:
            raise JobFailed("RuntimeError: it does not run")
        if job.candidate.startswith("launches"):
            return SimpleNamespace(lines=(f"## each launch of {job.model}",), note="")
        return SimpleNamespace(ms=2.0, note="", lines=(), plain_ms=3.0 if job.candidate == "trace fp16" else None)

    return SimpleNamespace(do=do)


def soon():
    return time.monotonic() + 60


def test_a_second_run_does_what_the_first_one_left(two_runs):
    script, jobs, report, folder = two_runs
    first = report()
    assert script.run(jobs[:2], working(("trace fp16",)), first, folder, soon()) == []
    first.write(folder, jobs[2:])
    page = (folder / "cuda_engine.md").read_text()
    assert "Measured in 1 run: " in page and "* int8, swinv2, batch 32" in page.partition("## Not reached")[2]

    second = report()
    assert "1 times of 1 runs are kept" in second.go_on(folder)
    left = second.open(jobs)
    assert left == [*jobs[2:], jobs[1]]  # failed jobs are tried again, but last
    assert script.run(left, working(), second, folder, soon()) == []
    page = (folder / "cuda_engine.md").read_text()
    assert "Measured in 2 runs: " in page and "Failed" not in page and "Not reached" not in page
    assert page.count("| 2.000 |") == 2 and "## each launch of swin\n" in page

    third = report()
    third.go_on(folder)
    assert third.open(jobs) == [] and third.rows == second.rows and third.launches == second.launches


@pytest.mark.parametrize("change", ["driver", "sources", "damage"])
def test_times_of_something_else_are_put_aside(two_runs, change):
    script, jobs, report, folder = two_runs
    script.run(jobs, working(), report(driver="1"), folder, soon())
    written = (folder / "cuda_engine.json").read_text()
    if change == "damage":
        written = written[:-40]
        (folder / "cuda_engine.json").write_text(written)
    now = report(**{"driver": "1", change: "2"})
    assert "is measured anew" in (said := now.go_on(folder)) and (change == "damage" or f"of other {change}:" in said)
    assert now.open(jobs) == jobs and not now.runs and not (folder / "cuda_engine.json").exists()
    data, page = sorted(folder.iterdir())
    assert data.read_text() == written and data.name in said and page.name == f"{data.stem}.md"


def test_what_had_less_than_its_time_has_not_failed(two_runs, monkeypatch):
    script, jobs, report, folder = two_runs
    monkeypatch.setattr(script, "LEAST", 0.1)
    now, end = report(), time.monotonic() + 0.3

    def do(job, seconds):
        time.sleep(max(end - time.monotonic(), 0))
        raise JobFailed(f"took more than {seconds:.0f} s")

    assert script.run(jobs, SimpleNamespace(do=do), now, folder, end) == jobs and not now.failed


def test_single_launches_find_nothing_in_the_cache(benchmark, monkeypatch):
    """Operands are random, not zeros, and exceed the cache."""
    script, gpu = benchmark("cuda_candidates"), SimpleNamespace(L2_cache_size=2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    program = script.fused_program(script.packed("swin_digits", "int8").spec, 2, None, script.NO_TILES)
    for launch in program.launches:
        copies = script.copies_of(launch, torch.device("cuda"))
        assert copies == script.MOST_COPIES or copies >= 3 and copies * launch.bytes_moved >= 2 * gpu.L2_cache_size
    read, compute = [], PatchEmbedKernel.reference

    def noted(kernel):
        read.append(kernel.images)
        compute(kernel)

    monkeypatch.setattr(PatchEmbedKernel, "reference", noted)
    lines = list(script.single_launches("swin_digits", 2, script.Place("cpu"), "int8"))
    assert len(lines) == len(program.launches) + 3 and "Error" not in "".join(lines)
    assert read and all(images.float().std() > 0 for images in read)


@pytest.mark.parametrize("precision", ["int8", "float"])
def test_kernels_that_compute_something_else_are_not_timed(benchmark, monkeypatch, precision):
    script, compute = benchmark("cuda_candidates"), GemmKernel.reference
    place, images = script.Place("cpu"), torch.randn(3, *script.shape_of("swin_digits"))

    def timed():
        return script.engine("swin_digits", len(images), place, precision)

    timed()(images)

    def one_row_too_few(kernel):
        last = kernel.out.view(-1, kernel.out.shape[-1])[-1]
        before = last.clone()
        compute(kernel)
        last.copy_(before)

    monkeypatch.setattr(GemmKernel, "reference", one_row_too_few)
    with pytest.raises(SwinQuantError, match="wrong logits, whose time is none: SQNR .* dB to the references', .* at"):
        timed()


def answering(labels, noise=0.0):
    return lambda images: torch.nn.functional.one_hot(labels[images[:, 0, 0, 0].long()], 3) + noise


def pictures(count):
    """Pictures whose only value is their number, and their labels."""
    labels = torch.arange(count) % 3
    images = torch.arange(count).float()[:, None, None, None].expand(-1, 3, 1, 1)
    return labels, [Batch(images, labels, list(range(count)), [])]


def flipped(labels, first, last):
    other = labels.clone()
    other[first:last] = (other[first:last] + 1) % 3
    return other


@pytest.mark.parametrize(
    ("count", "flips", "said"),
    [
        (200, 0, ""),
        (200, 1, ""),  # one picture is half a point
        (10_000, 2, ""),
        (10_000, 8, ""),  # three standard errors are 0.085 points
        (10_000, 12, "top-1 differs by -0.12 points: 0.10 at most"),
    ],
)
def test_an_engine_that_answers_otherwise_is_told_of(benchmark, count, flips, said):
    script, (labels, batches) = benchmark("cuda_accuracy"), pictures(count)
    right, engine = answering(labels), answering(flipped(labels, 0, flips))
    found = script.judged(right, right, engine, batches, torch.device("cpu"))
    assert script.wrong(found) == said
    assert found.pair.delta_acc1 == found.engine.delta_acc1 == pytest.approx(-100 * flips / count)
    assert (found.pair.sqnr_db is None) == (not flips) and found.before.sqnr_db is None


def test_an_engine_that_adds_more_noise_is_told_of_whatever_top_1_is(benchmark):
    script, (labels, batches) = benchmark("cuda_accuracy"), pictures(60)
    runs = [answering(labels, noise) for noise in (0.0, 0.01, 0.02)]
    found = script.judged(*runs, batches, torch.device("cpu"))
    assert script.wrong(found) == "SQNR to the float model is 6.0 dB less: 1 at most" and not found.pair.delta_acc1
    assert not script.wrong(script.judged(runs[0], runs[2], runs[1], batches, torch.device("cpu")))


@pytest.mark.parametrize("more", [["--device", "cuda"], ["--models", "my.yaml=my.pth"], ["--output", "page.md"]])
def test_the_page_of_results_is_that_of_the_examples_on_a_cpu_alone(benchmark, monkeypatch, more):
    script, written = benchmark("cuda_accuracy"), []
    monkeypatch.setattr(script, "one_page", written.append)
    monkeypatch.setattr(script, "SECTIONS", {})  # otherwise one would be written
    monkeypatch.setattr("sys.argv", ["cuda_accuracy.py", "--data-path", "digits", *more])
    script.main()
    assert len(written) == 1


def test_the_difference_is_that_of_pictures_which_one_alone_gets_right(benchmark):
    script, (labels, batches) = benchmark("cuda_accuracy"), pictures(1000)
    before, engine = answering(flipped(labels, 0, 10)), answering(flipped(labels, 5, 12))  # 5 gained, 2 lost
    pair = script.judged(answering(labels), before, engine, batches, torch.device("cpu")).pair
    per_picture = torch.tensor([1.0] * 5 + [-1.0] * 2 + [0.0] * 993, dtype=torch.float64)
    assert pair.delta_acc1 == pytest.approx(0.3)
    assert pair.delta_acc1_se == pytest.approx(100 * (per_picture.std(correction=0) / 1000**0.5).item())
    assert pair.agreement == pytest.approx(99.3)


@pytest.mark.slow
def test_digits_that_are_scored_are_5000_others_with_the_same_labels(benchmark):
    pytest.importorskip("sklearn")
    files = benchmark("cuda_files")
    cfg = load_config(find_config("swin_digits"))
    moved, digits = files.pictures_of(cfg, "digits", "val"), open_pictures("digits", "val", num_classes=10)
    seen = {moved.open(index).tobytes() for index in range(len(moved))}
    assert len(seen) == len(set(moved.names)) == len(moved) >= 5000
    assert all(label == digits.labels[index % len(digits)] for index, label in enumerate(moved.labels))
    assert moved.open(700).tobytes() == files.MovedDigits(digits).open(700).tobytes()
    ink = [np.asarray(moved.open(index), float).sum() for index in (3, 3 + len(digits))]
    assert ink[1] == pytest.approx(ink[0], rel=0.1)  # nothing was shifted out of the picture
    assert len(files.pictures_of(cfg, "digits", "train")) == 1797 - len(digits)


def test_what_is_taken_apart_is_put_together_again(benchmark):
    """Without its halves the engine is closer to fake-quant."""
    rounding, candidates = benchmark("cuda_rounding"), benchmark("cuda_candidates")
    model = candidates.calibrated("swin_digits", "cuda")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def engine():
        return candidates.HostSession(candidates.pack(model, candidates.spec_for(model)))(images)

    with torch.inference_mode():
        quantize(model)
        before = model(images)
        as_it_is = candidates.sqnr_db(before, engine())
        for change in rounding.CHANGES.values():
            with change(model):
                assert candidates.sqnr_db(before, model(images)) > 20
            assert torch.equal(model(images), before)
        with rounding.in_float32():
            assert candidates.sqnr_db(before, engine()) > as_it_is + 3
        assert candidates.sqnr_db(before, engine()) == as_it_is
        dequantize(model)


def test_the_page_of_cpu_engines_and_the_measured_gains_are_those_of_its_data(benchmark):
    script = benchmark("cpu_page")
    assert script.page(script.read()) == script.PAGE.read_text()
    assert script.measured(script.read()) == script.MEASURED.read_text()


def test_pages_of_passes_come_from_their_tables(benchmark, tmp_path, monkeypatch):
    script = benchmark("passes")
    rows, planted = script.written(), script.written_planted()
    wanted = [key for key, _ in script.planted_rows(Path())]
    names = {place.with_suffix(suffix).name: place.with_suffix(suffix) for place in (script.PAGE, script.PLANTED_PAGE)
             for suffix in (".md", ".csv")}  # fmt: skip
    monkeypatch.setattr(script, "PAGE", tmp_path / "passes.md")
    monkeypatch.setattr(script, "PLANTED_PAGE", tmp_path / "planted.md")
    script.write(rows)  # among them passes that VARIANTS no longer has
    script.write_planted(planted, wanted)
    assert {name: (tmp_path / name).read_text() for name in names} == {name: f.read_text() for name, f in names.items()}
