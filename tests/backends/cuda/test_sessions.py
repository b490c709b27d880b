"""The programs that batches run as, callers in several threads, and lack of memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.backends.cuda.gpu import load_machine
from swin_quant.backends.cuda.kernels.rows import PatchEmbedKernel
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.sessions import GraphSession, HostSession, sizes
from swin_quant.backends.cuda.spec import spec_for
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.data.preprocess import Preprocess
from tests.backends.conftest import pictures
from tests.backends.cuda.conftest import PREPROCESS


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_no_batch_is_filled_up_by_more_than_half(largest, batch):
    batch = min(batch, largest)
    size = next(size for size in sizes(largest) if size >= batch)
    assert batch <= size <= 1.5 * batch
    assert sizes(largest) == sorted(set(sizes(largest))) and sizes(largest)[-1] == largest


def test_threads_that_call_at_once_get_the_logits_of_their_own_pictures(calibrated, monkeypatch):
    model = calibrated("swin")
    session = HostSession(pack(model, spec_for(model, "int8")))
    images = pictures(2, seed=3).split(1)
    expected = [session(one) for one in images]
    assert not torch.equal(*expected)
    both, compute = threading.Barrier(2), PatchEmbedKernel.reference

    def when_both_have_pictures(kernel):
        try:
            both.wait(0.5)
        except threading.BrokenBarrierError:
            pass  # the other caller waits for its turn
        compute(kernel)

    monkeypatch.setattr(PatchEmbedKernel, "reference", when_both_have_pictures)
    session._bound.clear()
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(session, images))
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def sessions(calibrated, monkeypatch):
    """make() -> a session with the CPU as its GPU: a graph is its program, and `events` records calls on streams.

    A caller's stream is the word in `stream`.
    """
    events, stream = [], SimpleNamespace(name="one", wait_event=lambda done: events.append(f"{stream.name} waits"))
    done = SimpleNamespace(
        record=lambda at: events.append(f"{at.name} records"), synchronize=lambda: events.append("all is done")
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.name == "captures")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**20, 8000 * 2**20))
    monkeypatch.setattr(torch.cuda, "Event", lambda: done)
    monkeypatch.setattr(GraphSession, "_capture", lambda self, bound: (bound, SimpleNamespace(replay=bound)))

    def make(preprocess=None, machine=None):
        model = calibrated("swin")
        network = pack(model, spec_for(model, pixels=preprocess is not None), preprocess)
        return GraphSession(network, torch.device("cpu"), 16, machine=machine)

    return SimpleNamespace(make=make, events=events, stream=stream)


def test_a_smaller_batch_works_in_the_memory_of_a_larger_one(sessions):
    """The answer is the same whatever the memory held before, also in its unfilled part."""
    session, images = sessions.make(), pictures(16)
    places = {count: session.captured(count)[0].images.untyped_storage().data_ptr() for count in (4, 16, 12, 1)}
    assert places[16] == places[12] == places[1] != places[4]
    whole = HostSession(session.network)(images)
    for count in (16, 1, 4, 11, 16, 3):
        session._block.fill_(0x7F)  # NaN in half precision
        torch.testing.assert_close(session(images[:count]), whole[:count], rtol=0, atol=0.01)
    assert sorted(session._captured) == [1, 3, 4, 12, 16]  # batches are filled up, and programs kept


def test_a_call_inside_a_capture_of_the_caller_is_refused(sessions):
    session = sessions.make()
    sessions.stream.name = "captures"
    with pytest.raises(UsageError, match="^the CUDA engine replays graphs of its own: call it outside"):
        session(pictures(1))
    assert not sessions.events and not session._captured


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of\nmore")


@pytest.mark.parametrize(
    ("owner", "function"),
    [(torch.Tensor, "copy_"), (torch, "empty_like"), (torch.Tensor, "to"), (Preprocess, "pixels")],
)
def test_out_of_memory_in_a_call_names_the_batch_and_what_was_asked_for(sessions, monkeypatch, owner, function):
    """For copied pictures, for logits, and for pixels made from pictures: all after a program that fits."""
    session = sessions.make(PREPROCESS)
    images, pixels = pictures(5), PREPROCESS.pixels(pictures(5))
    expected = session(images)
    with monkeypatch.context() as patched, pytest.raises(SwinQuantError) as error:
        patched.setattr(owner, function, full)
        session(images)
    said = "out of GPU memory: a batch of 5 needs 2.00 GiB more, 100 of 8000 MB are free: give a smaller batch"
    assert str(error.value) == said
    assert torch.equal(session(pixels), expected)


class TritonError(Exception):
    """Named as Triton's own, which is recognised by name."""


def test_what_a_gpu_cannot_have_fused_runs_apart_and_is_told_of(sessions, monkeypatch, caplog):
    """For example kernels with whole rows, if a program has less memory; a launch that cannot run unfused is an
    error."""
    session, capture, most = sessions.make(machine=load_machine("h200")), GraphSession._capture, [0]
    apart = len(build_program(session.network.spec, 4).launches)

    def refusing(self, bound):
        most[0] = max(most[0], len(bound.calls))
        if len(bound.calls) < apart + is_apart_refused:
            raise TritonError("out of resource: shared memory")
        return capture(self, bound)

    monkeypatch.setattr(GraphSession, "_capture", refusing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    is_apart_refused = False
    found = session(pictures(4))
    assert torch.equal(found, HostSession(session.network)(pictures(4))) and most == [apart]
    assert "NVIDIA L4: Triton has no kernel of a batch of 4" in caplog.text and "launches run apart" in caplog.text
    is_apart_refused = True
    with pytest.raises(SwinQuantError, match="Triton has no kernel of a batch of 2 for it: TritonError: out of"):
        session(pictures(2))
