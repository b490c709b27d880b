"""Floors and fusions by hand; operations against those that a trace of the model counts."""

from pathlib import Path

import pytest
import torch

from swin_quant.backends.cuda.choose_fusions import CACHE_BYTES_US
from swin_quant.backends.cuda.floors import bytes_of, floor_of, gpu_of
from swin_quant.backends.cuda.planning import cuda_plan
from swin_quant.backends.cuda.program import Launch, TensorRef
from swin_quant.base.errors import UsageError
from swin_quant.config import load_config
from swin_quant.config.load import find_config
from swin_quant.models import build_model
from swin_quant.operators.roofline import GpuFacts, Machine, load_machine
from swin_quant.operators.trace import trace
from tests.backends.cuda.conftest import launches_of

ROOT = Path(__file__).parents[3]
GPU = Machine("by hand", "here", "float16", 1.0, 4.0, 1.0, GpuFacts(90, 2, fp8_tflops=2.0, launch_us=1.0))


def buffer(name, nbytes):
    return TensorRef(name, torch.int8, (nbytes // 100, 100))


X, Y, Z = buffer("x", 3000), buffer("y", 500), buffer("z", 200)
W = TensorRef("w", torch.int8, (100,), packed=True)
FIRST = Launch("gemm", "a", {"a": X, "w": W, "out": Y}, 8_000_000, "int8")
SECOND = Launch("gemm", "b", {"a": Y, "residual": X, "out": X}, 1_000_000, "float16")
THIRD = Launch("norm", "c", {"x": X, "out": Z})


def test_a_launch_takes_the_longest_of_bytes_products_and_launching():
    first, second, third = (floor_of([one], GPU) for one in (FIRST, SECOND, THIRD))
    assert (first.bytes, first.memory_us, first.compute_us) == (3600, pytest.approx(3.6), pytest.approx(2.0))
    assert (first.us, first.bound) == (pytest.approx(3.6), "memory")
    assert second.compute_us == pytest.approx(1.0) and third.compute_us == 0
    small = floor_of([Launch("norm", "d", {"x": Z, "out": Z})], GPU)
    assert (small.us, small.bound) == (1.0, "launch")
    fast = floor_of([FIRST], GPU, fp8=True)
    assert (fast.compute_us, fast.bound) == (pytest.approx(4.0), "products")


@pytest.mark.parametrize(
    "group, after, moved",
    [
        ([FIRST, SECOND], [THIRD], 3000 + 100 + 3000),  # y stays on the chip, x is read once, and written for c
        ([FIRST, SECOND], [], 3000 + 100),
        ([FIRST, SECOND], [SECOND], 3000 + 100 + 500 + 3000),  # y is read again
        ([SECOND, THIRD], [], 500 + 3000),  # c's input is there already
        ([FIRST], [], 3600),
    ],
)
def test_fused_launches_move_what_comes_from_outside_and_what_is_read_later(group, after, moved):
    assert bytes_of(group, after) == moved


MODELS = (
    "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224", "swin_large_patch4_window7_224_22kto1k_finetune",
    "swinv2_tiny_patch4_window8_256", "swinv2_base_patch4_window8_256",
)  # fmt: skip


@pytest.fixture(scope="module")
def attentions():
    """Attention launches of int8 models, unfused, at batch 1 and 32."""
    lists = [launches_of(name, batch=batch) for name in MODELS for batch in (1, 32)]
    return [one for launches in lists for one in launches if one.op == "attention"]


@pytest.mark.parametrize(
    "gpu, most", [("a100", 0.30), ("a100_80gb", 0.39), ("h100", 0.53), ("h200", 0.76), ("b200", 1.08)]
)
def test_attention_of_one_window_a_program_waits_for_memory_rather_than_the_cache(attentions, gpu, most):
    """A floor counts the position bias once. A program of one window reads it again from the cache, in less time than
    the floor on all GPUs but the last: several windows a program, the default of large batches, save instructions."""
    machine, shares = load_machine(gpu), []
    for launch in attentions:
        qkv, out, bias = (launch.operands[word].nbytes for word in ("qkv", "out", "position_bias"))
        windows = launch.operands["qkv"].shape[0] // launch.arguments["windows"].tokens
        floor = floor_of([launch], machine)
        assert floor.bytes == qkv + out + bias
        shares.append((qkv + out + windows * bias) / gpu_of(machine).sms / CACHE_BYTES_US / floor.us)
    assert max(shares) == pytest.approx(most, abs=0.005)
    if gpu in ("h200", "b200"):
        assert f"{most}" in (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")


def plan(name, machine=GPU, batch=2):
    return cuda_plan(load_config(find_config(name)), machine, batch)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_operations_are_those_of_the_model(tiny_config, kind):
    """A trace of the model counts them, except those of V2's bias, which are done in advance."""
    cfg = tiny_config(kind, EMBED_DIM=64)
    with torch.device("meta"):
        model = build_model(cfg).eval()
    calls = trace(model, (2, model.in_chans, cfg.DATA.IMG_SIZE, cfg.DATA.IMG_SIZE))
    macs = sum(call.macs for call in calls if "cpb_mlp" not in call.module)
    planned = cuda_plan(cfg, GPU, 2)
    assert sum(one.floors["int8"].operations for one in planned.launches) == 2 * macs > 0


def test_int8_and_fp16_are_planned_side_by_side():
    found = plan("swin_tiny_patch4_window7_224")
    assert found.precisions == ("int8", "fp16", "fp8")
    assert 1 < found.gain < 4  # products have 4 times the peak on this machine, bytes are halved at most
    assert all(one.floors["int8"].us <= one.floors["fp16"].us for one in found.launches)
    attention = [one for one in found.launches if one.op in ("attention", "attention_norm")]
    tokens, projection = 2 * 3136, attention[0].op == "attention_norm"
    assert len(attention) == 12
    assert attention[0].floors["int8"].operations == 4 * tokens * 49 * 96 + projection * 2 * tokens * 96**2


@pytest.mark.parametrize(
    "name, kernels", [("swin_tiny_patch4_window7_224", 93), ("swinv2_tiny_patch4_window8_256", 108)]
)
def test_what_is_executed_lies_between_each_apart_and_all_fused(name, kernels):
    found = plan(name, load_machine("h200"), batch=32)
    choices = {one.name: one for one in found.fusions["int8"]}
    executed, apart, fused = (choices[choice] for choice in ("as executed", "each apart", "all that fit"))
    assert executed.us == pytest.approx(found.us("int8")) and executed.launches == len(found.launches)
    assert fused.us < executed.us < apart.us and fused.launches <= executed.launches < apart.launches
    assert all(one.us < apart.us and one.bytes < apart.bytes for one in choices.values() if one is not apart)
    assert apart.launches == kernels


def test_what_cannot_be_planned_is_one_line():
    with pytest.raises(UsageError, match="T4.* is no GPU that the CUDA engine runs on"):
        plan("swin_tiny_patch4_window7_224", load_machine("t4"))
    with pytest.raises(UsageError, match="‹?batch›? 0: must be from 1"):
        plan("swin_tiny_patch4_window7_224", batch=0)
