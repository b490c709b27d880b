"""OpenVINO runs a file as written, in the float type asked for, and reports which operators are int8."""

import gc
import signal

import numpy as np
import pytest
import torch

from swin_quant.backends import engine_loader
from swin_quant.backends.openvino import engine as openvino
from swin_quant.base.errors import UsageError
from swin_quant.score.options import EngineOptions


@pytest.fixture(scope="module")
def load():
    return engine_loader("openvino")


@pytest.fixture
def images():
    return torch.randn(3, 3, 8, 8)


@pytest.mark.slow
def test_a_signal_after_the_last_engine_has_gone_is_heard(load, small_net, artifact_of, images):
    """On CPUs with AMX the library makes signals arrive on its own stack, which it used to free with the last
    engine."""
    engine = load(artifact_of(small_net()))
    engine(images)
    del engine
    gc.collect()
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert heard == [1]


def test_results_do_not_change_under_the_caller(load, small_net, artifact_of, images):
    engine = load(artifact_of(small_net()), EngineOptions(threads=1))
    first = engine(images)
    kept = first.clone()
    engine(images.flip(0))
    assert torch.equal(first, kept)


def test_under_a_limit_without_half_types_there_is_float32_alone(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert openvino.float_types() == ["float32"]


def test_bfloat16_is_said_and_is_coarser(load, small_net, artifact_of, images):
    if "bfloat16" not in openvino.float_types():
        pytest.skip("this CPU has no bfloat16, or oneDNN must not use it")
    net = small_net(int8=False)
    artifact = artifact_of(net, "float32")
    engine = load(artifact, EngineOptions(float_type="bfloat16"))
    assert engine.precision == "bfloat16" and set(engine.details["gemms"].values()) == {"bfloat16"}
    assert 1e-4 < np.abs(engine(images).numpy() - net(images)).max() < 0.5
    assert load(artifact_of(small_net()), EngineOptions(float_type="bfloat16")).precision == "int8+bfloat16"


def test_float32_is_the_default_whatever_the_library_prefers(load, small_net, artifact_of):
    engine = load(artifact_of(small_net(int8=False), "float32"), EngineOptions())
    assert engine.precision == "float32" and engine.details["float_type"] == "float32"
    assert set(engine.details["gemms"].values()) == {"float32"} and engine.details["all_gemms"] == 5


def test_compiled_graphs_are_kept_for_the_latest_sizes_of_batch_only(load, small_net, artifact_of, images):
    net = small_net()
    engine = load(artifact_of(net), EngineOptions(threads=1))
    graphs = engine.run.args[0]
    for batch in (3, 1, 2, 1):
        assert np.abs(engine(images[:batch]).numpy() - net(images[:batch])).max() < 1e-3
    assert list(graphs.compiled) == [(2, 3, 8, 8), (1, 3, 8, 8)]


def test_a_type_that_the_cpu_has_not_is_refused(load, small_net, artifact_of, monkeypatch):
    monkeypatch.setattr(openvino, "float_types", lambda: ["float32"])
    with pytest.raises(UsageError, match="this CPU does not run bfloat16: choose float32"):
        load(artifact_of(small_net()), EngineOptions(float_type="bfloat16"))
