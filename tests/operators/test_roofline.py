"""Limits from peaks, by hand."""

import pytest

from swin_quant.base.errors import UsageError
from swin_quant.operators.roofline import OTHERS, Machine, gpus, limits, load_machine, machines
from swin_quant.operators.trace import Call

MACHINE = Machine("by hand", "here", "float16", float_tflops=1.0, int8_tops=4.0, bandwidth_gbs=1.0)


def test_each_call_takes_as_long_as_its_arithmetic_and_its_bytes():
    product = Call("linear", "a.fc", (), (), macs=10**6, activations=2000, weights=1000)  # 2 µs, 1.5 µs
    moved = Call("roll", "a", (), (), activations=4000)  # 2 µs in half precision, and in int8 too
    outside = Call("linear", "head", (), (), macs=500, activations=4000)  # 0.001 µs, 2 µs
    block, other, everything = limits([product, moved, outside], ["a"], MACHINE)
    assert (block.block, other.block, everything.block) == ("a", OTHERS, "all")
    assert block.float_us == pytest.approx(2.0 + 2.0) and block.int8_us == pytest.approx(0.75 + 2.0)
    assert (block.fused_us, block.fused_int8_us) == (pytest.approx(2.0), pytest.approx(0.75))
    assert (block.bound, other.bound) == ("compute", "memory") and other.gain == pytest.approx(2.0)
    assert everything.float_us == pytest.approx(6.0) and everything.bytes == 5500


def test_machines_have_a_source_and_are_checked(tmp_path):
    assert {"a100", "h100", "t4"} <= set(machines()) and all(load_machine(name).source for name in machines())
    assert "h200" in gpus() and "t4" not in gpus()
    file = tmp_path / "mine.yaml"
    peaks = "description: x\nsource: y\nfloat_type: float32\nfloat_tflops: 1\nint8_tops: 2\nbandwidth_gbs: 1\n"
    for given, launch_us in (("", 1.6), ("  launch_us: 2.5\n", 2.5)):
        file.write_text(f"{peaks}gpu:\n  capability: 90\n  sms: 132\n{given}")
        assert load_machine(str(file)).gpu.launch_us == launch_us
    file.write_text(peaks.replace("int8_tops: 2", "int8_tops: -2"))
    with pytest.raises(Exception, match="mine.yaml: int8_tops is -2.0, but must be above 0"):
        load_machine(str(file))
    with pytest.raises(UsageError, match="no machine 'tpu': give a10, a100, .* or a .yaml file"):
        load_machine("tpu")
