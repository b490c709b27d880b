"""Which programs batches run as, callers in several threads, and memory that is not there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.cuda.choice import spec_for
from swin_quant.backends.cuda.kernels import patch_embed
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.sessions import GraphSession, HostSession, sizes
from swin_quant.base.errors import SwinQuantError


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_no_batch_is_filled_up_by_more_than_half(largest, batch):
    batch = min(batch, largest)
    size = next(size for size in sizes(largest) if size >= batch)
    assert batch <= size <= 1.5 * batch
    assert sizes(largest) == sorted(set(sizes(largest))) and sizes(largest)[-1] == largest


def test_threads_that_call_at_once_get_the_logits_of_their_own_pictures(calibrated, monkeypatch):
    model = calibrated("swin")
    session = HostSession(pack(model, spec_for(model, "int8")))
    pictures = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    expected = [session(one) for one in pictures]
    assert not torch.equal(*expected)
    both, compute = threading.Barrier(2), patch_embed.reference

    def when_both_have_pictures(*args, **more):
        try:
            both.wait(0.5)
        except threading.BrokenBarrierError:
            pass  # the other one waits for its turn
        compute(*args, **more)

    monkeypatch.setattr(patch_embed, "reference", when_both_have_pictures)
    session._bound.clear()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(session, pictures))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines"),
        RuntimeError("Triton Error [CUDA]: out of memory"),  # of the loader of kernels
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),  # of a graph
    ],
)
def test_out_of_memory_names_the_batch_and_what_it_needs(monkeypatch, error):
    session = object.__new__(GraphSession)
    session.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**20, 8000 * 2**20))

    def full():
        raise error

    with pytest.raises(
        SwinQuantError, match="a batch of 64 needs 300 MB, 100 of 8000 MB are free: give a smaller"
    ) as e:
        session._on_gpu(full, "a batch of 64", 300 * 2**20)
    assert "\n" not in str(e.value)


def test_of_weights_that_do_not_fit_no_batch_is_blamed(monkeypatch):
    network = SimpleNamespace(tensors={"w": torch.zeros(2**20, device="meta")})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 8000 * 2**20))

    def full(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(SwinQuantError, match="the weights needs 4 MB, 1 of 8000 MB are free: end what else") as e:
        GraphSession(network, torch.device("cuda"), 64)
    assert "batch" not in str(e.value)


def test_another_error_of_the_driver_is_no_lack_of_memory():
    session = object.__new__(GraphSession)

    def lost():
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        session._on_gpu(lost, "a batch of 64", 0)


def test_a_kernel_that_the_gpu_cannot_have_is_one_line(monkeypatch):
    errors = pytest.importorskip("triton.runtime.errors")
    session = object.__new__(GraphSession)
    session.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")

    def refused():
        raise errors.OutOfResources(150_000, 101_376, "shared memory")

    with pytest.raises(SwinQuantError, match="NVIDIA L4: Triton has no kernel of a batch of 8 .* Required: 150000"):
        session._on_gpu(refused, "a batch of 8", 0)
    with pytest.raises(ZeroDivisionError):
        session._on_gpu(lambda: 1 // 0, "a batch of 8", 0)
