"""A GPU's errors are one line; shipped machines have sources, and a file of one's own is checked."""

import pytest
import torch

from swin_quant.backends.cuda.gpu import gpu_errors, gpus, load_machine
from swin_quant.base.errors import SwinQuantError, UsageError


@pytest.mark.parametrize(
    ("error", "needs"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines"), "2.00 GiB more"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "more"),  # from the loader of kernels
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"), "more"),  # from a graph
    ],
)
def test_out_of_memory_names_the_batch_and_what_it_needs(monkeypatch, error, needs):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**20, 8000 * 2**20))
    for need, told in ((300 * 2**20, "300 MB"), (None, needs)):
        with pytest.raises(SwinQuantError) as e, gpu_errors("a batch of 64", torch.device("cuda"), need):
            raise error
        assert str(e.value) == (
            f"out of GPU memory: a batch of 64 needs {told}, 100 of 8000 MB are free: give a smaller batch"
        )


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), ZeroDivisionError("a bug of ours")],
)
def test_another_error_stays_what_it_is(error):
    with pytest.raises(type(error)) as found, gpu_errors("a batch of 64", torch.device("cuda")):
        raise error
    assert found.value is error


def test_a_kernel_that_the_gpu_cannot_have_is_one_line(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    with pytest.raises(SwinQuantError, match="NVIDIA L4: Triton has no kernel of a batch of 8 .* Required: 150000"):
        with gpu_errors("a batch of 8", torch.device("cuda")):
            raise errors.OutOfResources(150_000, 101_376, "shared memory")


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
