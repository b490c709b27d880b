"""The shipped machines have sources, and a file of one's own is checked."""

import pytest

from swin_quant.backends.cuda.machines import gpus, load_machine
from swin_quant.base.errors import UsageError


def test_machines_have_a_source_and_are_checked(tmp_path):
    assert {"a100", "h100", "h200"} <= set(gpus()) and all(load_machine(name).source for name in gpus())
    file = tmp_path / "mine.yaml"
    peaks = "description: x\nsource: y\nfloat_type: float32\nfloat_tflops: 1\nint8_tops: 2\nbandwidth_gbs: 1\n"
    gpu = "gpu:\n  capability: 90\n  sms: 132\n"
    for given, launch_us in (("", 1.6), ("  launch_us: 2.5\n", 2.5)):
        file.write_text(f"{peaks}{gpu}{given}")
        assert load_machine(str(file)).gpu.launch_us == launch_us
    file.write_text(peaks.replace("int8_tops: 2", "int8_tops: -2") + gpu)
    with pytest.raises(Exception, match="mine.yaml: int8_tops is -2.0, but must be above 0"):
        load_machine(str(file))
    file.write_text(peaks)
    with pytest.raises(Exception, match="mine.yaml: .*gpu"):
        load_machine(str(file))
    with pytest.raises(UsageError, match="no machine 'tpu': give a10, a100, .* or a .yaml file"):
        load_machine("tpu")
