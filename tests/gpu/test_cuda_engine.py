"""The CUDA engine on a GPU: its kernels against their references, one graph a batch, streams of the caller."""

import pytest
import torch

from swin_quant.backends.cuda.choice import spec_for
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.sessions import GraphSession, HostSession

CASES = [("swin", "ft-mode1"), ("swin", "ft-mode2"), ("swin", "cuda"), ("swinv2", "ft-mode1"), ("swinv2", "cuda")]


@pytest.fixture
def sessions(calibrated, gpu):
    """make(kind, policy, precision="int8") -> the network on the GPU, and by references on the CPU."""
    if gpu.type != "cuda":
        pytest.skip("CUDA graphs are a GPU's")

    def make(kind, policy="cuda", precision="int8"):
        model = calibrated(kind, policy)
        network = pack(model, spec_for(model, precision))
        return GraphSession(network, gpu, 16), HostSession(network)

    return make


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_kernels_compute_what_their_references_do(sessions, images, kind, policy):
    on_gpu, on_cpu = sessions(kind, policy)
    expected = on_cpu(images)
    got = on_gpu(images.cuda())
    assert got.is_cuda and (got.cpu() - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_float8(sessions, images, kind):
    """A value between two levels may be either, and those of float8 are further apart."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    on_gpu, on_cpu = sessions(kind, "cuda-fp8")
    expected = on_cpu(images)
    assert (on_gpu(images.cuda()).cpu() - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_the_half_form(sessions, images, kind):
    on_gpu, on_cpu = sessions(kind, "float", "float")
    assert (on_gpu(images.cuda()).cpu() - on_cpu(images)).abs().mean() < 0.005


def test_batches_are_filled_up_and_graphs_are_kept(sessions, images):
    session, _ = sessions("swin")
    whole = session(images.cuda())
    for count in (5, 6, 16):  # each size is compiled, which takes half a minute
        torch.testing.assert_close(session(images[:count].cuda()), whole[:count], atol=1e-3, rtol=1e-3)
    assert sorted(session._captured) == [6, 16]
    assert session.captured(5) is session.captured(6)


def test_replaying_allocates_nothing(sessions, images):
    captured = sessions("swin")[0].captured(16)
    captured.bound.images.copy_(images)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        captured.graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_streams_of_the_caller_take_turns(sessions, images):
    session, _ = sessions("swin")
    given = [images.cuda(), images.flip(0).cuda()]
    expected = [session(one) for one in given]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for turn in range(10):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(session(given[turn % 2]))
    torch.cuda.synchronize()
    for turn, logits in enumerate(found):
        assert torch.equal(logits, expected[turn % 2])
