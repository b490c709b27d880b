"""Short traces: the same values as the module and torch's own way, with a second trace only where it is needed."""

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, ExportedProgram

from swin_quant.backends.onnx.tracing import short_traces


class Idle(nn.Module):
    """Casts that change nothing, dropout, and the views that torch always decomposes."""

    def forward(self, x):
        x = F.dropout(x.float().to(torch.float32), 0.5, training=False).to(dtype=torch.float32)
        first, second = x.flatten(1).unflatten(1, (2, 6)).chunk(2, dim=1)
        return (first @ second.transpose(1, 2)).permute(0, 2, 1).contiguous().reshape(-1, 1)


class Half(nn.Module):
    """A cast that rounds."""

    def forward(self, x):
        return (x * 4097).half().float()


class Promoted(nn.Module):
    """Sums and quotients of floats and whole numbers, of which ONNX has none."""

    def forward(self, x):
        numbers = torch.arange(4)
        return x + numbers + numbers / 3 - (x * 4).to(torch.int32) * 0.5


class Uneven(nn.Module):
    """Three chunks of four: torch makes two."""

    def forward(self, x):
        first, second = x.chunk(3, dim=2)
        return first - second


class InPlace(nn.Module):
    def forward(self, x):
        kept = x * 2
        kept[:, 0].add_(1)
        return kept


class Unknown(nn.Module):
    """An operator that torch decomposes and the exporter does not translate."""

    def forward(self, x):
        return F.huber_loss(x, x * 3, reduction="none")


@pytest.fixture
def decomposed(monkeypatch):
    """The programs that torch decomposed."""
    found, decompose = [], ExportedProgram.run_decompositions

    def counted(program, *args, **options):
        found.append(program)
        return decompose(program, *args, **options)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return found


def write(module, images, file):
    with torch.no_grad(), short_traces():
        torch.onnx.export(
            module.eval(), (images[:2],), file, dynamo=True, dynamic_shapes=({0: Dim("batch")},), verbose=False
        )


@pytest.mark.parametrize(
    ("module", "times"),
    [(Idle(), 0), (Half(), 0), (Promoted(), 0), (Uneven(), 1), (InPlace(), 1), (Unknown(), 1)],
    ids=["idle", "half", "promoted", "uneven", "in place", "unknown"],
)
def test_a_file_computes_what_the_module_does_for_any_batch(module, times, decomposed, tmp_path):
    images = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    write(module, images, tmp_path / "x.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "x.onnx").run(None, {"x": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(images), rtol=1e-6, atol=1e-6)
    assert len(decomposed) == times
    held = {node.op_type for node in onnx.load(tmp_path / "x.onnx").graph.node}
    assert ("Cast" in held) == isinstance(module, Half | Promoted) and "Dropout" not in held


def test_torch_is_left_as_it_was(decomposed):
    before = ExportedProgram.run_decompositions
    with pytest.raises(ZeroDivisionError), short_traces():
        assert ExportedProgram.run_decompositions is not before
        raise ZeroDivisionError
    assert ExportedProgram.run_decompositions is before
    assert torch.zeros(2).double().float().dtype is torch.float32


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_swin_is_traced_once(kind, exported, decomposed):
    for policy in ("qdq", "cpu"):
        exported(kind, policy)
    assert not decomposed
