"""The CUDA engine on a GPU: its kernels against their references, one graph a batch, streams of the caller."""

import pytest
import torch
from kernel_runs import NO_FLOAT8, has_float8

from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.sessions import GraphSession, HostSession
from swin_quant.backends.cuda.spec import spec_for
from swin_quant.base.errors import UsageError
from swin_quant.data.preprocess import Preprocess

PREPROCESS = Preprocess(size=32, crop=False, interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
FP8 = "cuda-fp8", "tensorrt-fp8"
CASES = [  # policy, type of the stream, allowed mean difference as a share of the logits' deviation
    *((kind, policy, "float16", 0.02) for kind in ("swin", "swinv2") for policy in ("ft-mode1", "cuda")),
    ("swin", "ft-mode2", "float16", 0.02),
    # A value on a tie may take either level, and float8's are farther apart. One policy has float8 probabilities too.
    *((kind, policy, "float16", 0.1) for kind, policy in (("swin", FP8[0]), ("swinv2", FP8[0]), ("swin", FP8[1]))),
    # The form that an export recommends for values beyond float16.
    *((kind, "cuda", "bfloat16", 0.03) for kind in ("swin", "swinv2")),
]


@pytest.fixture
def sessions(calibrated, cuda):
    """make(kind, policy, ...) -> the network on the GPU, and by references on the CPU. With `preprocess` it takes
    pixels; `change` gets the model before it is packed."""

    def make(kind, policy="cuda", precision="int8", float_type="float16", preprocess=None, change=None):
        model = calibrated(kind, policy)
        if change:
            change(model)
        network = pack(model, spec_for(model, precision, float_type, preprocess is not None), preprocess)
        return GraphSession(network, cuda, 16), HostSession(network)

    return make


@pytest.mark.parametrize(("kind", "policy", "float_type", "limit"), CASES)
def test_kernels_compute_what_their_references_do(sessions, images, kind, policy, float_type, limit):
    if policy in FP8 and not has_float8():
        pytest.skip(NO_FLOAT8)
    on_gpu, on_cpu = sessions(kind, policy, float_type=float_type)
    expected = on_cpu(images)
    got = on_gpu(images.cuda())
    assert got.is_cuda and (got.cpu() - expected).abs().mean() < limit * expected.std()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
# Bfloat16 has three bits less
@pytest.mark.parametrize(("float_type", "limit"), [("float16", 0.005), ("bfloat16", 0.02)])
def test_the_half_form(sessions, images, kind, float_type, limit):
    on_gpu, on_cpu = sessions(kind, "float", "float", float_type)
    assert (on_gpu(images.cuda()).cpu() - on_cpu(images)).abs().mean() < limit


@torch.no_grad()
def only_denormals(model):
    """Make everything that goes into the first stage's residual stream 1e-6 times as large."""
    branches = (layer for block in model.layers[0].blocks for layer in (block.attn.proj, block.mlp.fc2))
    for layer in (model.patch_embed.norm, *branches):
        layer.weight *= 1e-6
        layer.bias *= 1e-6


def test_denormals_are_not_flushed(sessions, images):
    """The smallest normal float16 is 6.1e-5. Flushed, the stream would be zero, and every picture's logits the same."""
    on_gpu, on_cpu = sessions("swin", "float", "float", change=only_denormals)
    expected = on_cpu(images)
    signal = (expected - expected.mean(0)).std()
    assert signal > 1e-4 and (on_gpu(images.cuda()).cpu() - expected).abs().mean() < 0.1 * signal


def test_pictures_as_pixels(sessions, images):
    """Decoded, or normalised: these become the same bytes again."""
    pixels = (images.permute(0, 2, 3, 1) * 64 + 128).clamp(0, 255).to(torch.uint8)
    on_gpu, on_cpu = sessions("swin", preprocess=PREPROCESS)
    expected, got = on_cpu(pixels), on_gpu(pixels.cuda())
    assert (got.cpu() - expected).abs().mean() < 0.02 * expected.std()
    assert torch.equal(on_gpu(PREPROCESS.normalised(pixels).cuda()), got)


def test_a_call_inside_a_capture_of_the_caller_is_refused(sessions, images):
    """The caller's capture stays intact."""
    session, given = sessions("swin")[0], images.cuda()
    expected, twice, graph = session(given), 2 * given, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = 2 * given
        with pytest.raises(UsageError, match="call it outside of your CUDA graph's capture"):
            session(given)
    graph.replay()
    assert torch.equal(found, twice) and torch.equal(session(given), expected)


def test_batches_are_filled_up_and_graphs_are_kept(sessions, images):
    session, _ = sessions("swin")
    whole = session(images.cuda())
    for count in (5, 6, 16):  # each size compiles for half a minute
        torch.testing.assert_close(session(images[:count].cuda()), whole[:count], atol=1e-3, rtol=1e-3)
    assert sorted(session._captured) == [6, 16]
    assert session.captured(5) is session.captured(6)


def on_two_streams(session, given):
    """Logits of ten calls, alternating between the two of `given`, each on its own stream, queued without a pause."""
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for turn in range(10):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(session(given[turn % 2]))
    torch.cuda.synchronize()
    return found


def test_batches_of_several_sizes_take_turns_in_one_memory(sessions, images):
    session, _ = sessions("swin")
    given = [images.cuda(), images[:5].flip(0).cuda()]
    expected = [session(one) for one in given]
    blocks = {one[0].images.untyped_storage().data_ptr() for one in session._captured.values()}
    assert len(session._captured) == 2 and len(blocks) == 1
    assert all(map(torch.equal, on_two_streams(session, given), 5 * expected))


def test_a_session_that_is_dropped_is_replayed_to_the_end(sessions, images):
    """Until then its memory is not reused, here by an allocation of the same size on the stream that made it."""
    session, given = sessions("swin")[0], images.cuda()
    expected, stream = session(given), torch.cuda.Stream()
    bytes_of_each = [tensor.nbytes for tensor in session.tensors.values()]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # cycles: long after the allocation below would have been written
        got = session(given)
    del session
    others = [torch.full((count,), 255, dtype=torch.uint8, device="cuda") for count in bytes_of_each]
    torch.cuda.synchronize()
    assert torch.equal(got, expected) and len(others) == len(bytes_of_each)
