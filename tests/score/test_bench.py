"""The bench: its candidates, the record of each, and that a failing one loses no other's. Never how fast they are."""

import signal
from functools import partial

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from swin_quant.backends.artifact import finish_artifact
from swin_quant.backends.registry import artifact_engine, engine_named
from swin_quant.base import cpu
from swin_quant.base.errors import UsageError
from swin_quant.cards.card import RunCard
from swin_quant.report.engines import bench_notes
from swin_quant.score.bench import BenchPictures, BenchPlan, measure
from swin_quant.score.candidate import BenchCandidate, Timing, interleave
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

SIDE = 4
SHAPE = (3, SIDE, SIDE)
QUICK = BenchPlan((3,), rounds=2, seconds=0.001, threads=1)  # a process for each candidate and batch


def linear(path, weight, batch):
    """A classifier: pixels times `weight` [48, 3]."""
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["x"]),
            helper.make_node("MatMul", ["x", "w"], ["logits"], name="head"),
        ],
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, *SHAPE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(weight.numpy(), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return finish_artifact(path, RunCard("linear", {}, {}), "onnx", "float32", {}).file


@pytest.fixture(scope="module")
def weight():
    return torch.randn(3 * SIDE**2, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def candidate(tmp_path_factory, weight):
    """candidate(name, factor=1.0, batch="batch", baseline=None) -> one that computes images @ (factor * weight)."""

    def make(name, factor=1.0, batch="batch", baseline=None, noise=0.0):
        other = factor * weight + noise * weight.flip(0)
        file = linear(tmp_path_factory.mktemp("candidate") / f"{name}.onnx", other, batch)
        load = partial(artifact_engine, str(file), engine_named("onnxruntime"), EngineOptions(threads=1))
        return BenchCandidate(name, load, file, baseline)

    return make


@pytest.fixture(scope="module")
def report(candidate):
    """Two good candidates and one whose process dies, on 5 pictures with labels."""
    field = [
        candidate("plain"),
        candidate("noisy", noise=0.01, baseline="plain"),
        BenchCandidate("broken", partial(signal.raise_signal, signal.SIGSEGV)),
    ]
    images = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    return measure("linear", field, QUICK, BenchPictures(images, torch.zeros(5, dtype=torch.int64), "5 pictures"))


@pytest.mark.slow
def test_every_candidate_has_a_row_which_holds_all_figures(report):
    assert [row.candidate for row in report.rows] == ["plain", "noisy", "broken"]
    row = report.rows[1]
    assert (row.engine, row.precision, row.policy) == ("onnxruntime", "float32", None)
    assert 0 < row.p50_ms <= row.p90_ms and row.calls >= 2
    assert row.images_per_s == pytest.approx(3 * 1000 / row.p50_ms)
    assert row.baseline == "plain" and row.speedup > 0
    assert row.peak_mb >= row.before_mb > 10
    assert row.file_mb == pytest.approx(48 * 3 * 4 / 1e6, rel=0.6)
    assert (row.int8_gemms, row.all_gemms) == (0, 1) and report.gemms["noisy"] == {"head": "float32"}
    assert row.library.startswith("onnxruntime ")


@pytest.mark.slow
def test_accuracy_is_measured_against_the_first_candidate(report):
    plain, noisy = report.rows[:2]
    assert report.reference == "plain" and plain.sqnr_db is None and plain.agreement is None
    assert noisy.sqnr_db == pytest.approx(40, abs=3)  # noise of 1 %
    assert 0 <= noisy.agreement <= 100 and 0 <= plain.acc1 <= 100


@pytest.mark.slow
def test_one_that_dies_is_a_row_that_says_so(report):
    broken = [row for row in report.rows if row.candidate == "broken"]
    assert [row.p50_ms for row in broken] == [None]
    assert all("broken: its process ended with signal 11 (SIGSEGV)" in row.failure for row in broken)


@pytest.mark.slow
def test_a_batch_above_a_fixed_engine_s_limit_or_of_another_size_is_refused(candidate, engines_here):
    with pytest.raises(UsageError, match="takes pictures of 3x4x4, not 3x5x5"):
        interleave([candidate("plain")], [1], 1, 0.001, (3, 5, 5))
    with pytest.raises(UsageError, match="fixed: onnxruntime: a batch of 3 is above its limit of 2 pictures"):
        interleave([candidate("fixed", batch=2)], [1, 3], 1, 0.001, SHAPE)


@pytest.mark.slow
def test_rows_are_in_the_order_of_batches_and_what_an_engine_says_of_this_cpu_is_among_the_notes(
    candidate, engines_here
):
    run = partial(torch.mean, dim=(2, 3))
    careful = partial(Engine, "careful", "int8", None, run, None, {"caution": "careful: this CPU is old"})
    field = [candidate("plain"), BenchCandidate("careful", careful), BenchCandidate("careful too", careful)]
    one = BenchPictures(torch.randn(1, *SHAPE), None, "one")
    report = measure("m", field, BenchPlan((1, 3), 1, 0.001, 1), one)
    order = [(batch, candidate.name) for batch in (1, 3) for candidate in field]
    assert [(row.batch, row.candidate) for row in report.rows] == order
    assert report.cautions == ["careful: this CPU is old"] and report.cautions[0] in bench_notes(report)


def test_percentiles_are_over_all_calls():
    timing = Timing("x", 4, rounds=[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]])
    assert (timing.calls, timing.p50_ms, timing.p90_ms) == (11, 6.0, 10.0)
    assert timing.images_per_s == pytest.approx(4000 / 6)
    assert Timing("x", 1, rounds=[[3.0]]).p90_ms == 3.0


def test_speedup_is_taken_within_rounds_so_that_drift_cancels():
    base = Timing("base", 1, rounds=[[10.0], [100.0], [20.0]])
    fast = Timing("fast", 1, rounds=[[5.0], [50.0], [10.0]])  # twice as fast in each round of a drifting machine
    assert fast.speedup(base) == 2.0 and base.speedup(base) == 1.0
    assert fast.speedup(Timing("none", 1)) is None


@pytest.mark.parametrize(
    "text, expected",
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_vnni avx2 amx_int8 amx_int8x\n", ["avx2", "avx512_vnni", "amx_int8"]),
        ("Features\t: fp asimd i8mm asimddp\n", ["asimddp", "i8mm"]),
        ("nothing known", []),
    ],
)
def test_the_features_of_a_cpu_are_read_by_whole_words(text, expected):
    assert cpu.features(cpu.INT8_FEATURES, text) == expected
