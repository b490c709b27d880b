"""Whole networks by fused kernels on a GPU: the results without fusions, and the choice for this GPU."""

import pytest
import torch

from swin_quant.backends.cuda.fusions import fused, rows
from swin_quant.backends.cuda.gpu import load_machine, name_here
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.program import bind
from swin_quant.backends.cuda.sessions import GraphSession
from swin_quant.backends.cuda.spec import spec_for


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("precision", ["int8", "float"])
def test_fused_kernels_compute_what_the_others_do(calibrated, cuda, images, kind, precision):
    model = calibrated(kind, "cuda")
    network = pack(model, spec_for(model, precision))
    tensors = {name: tensor.cuda() for name, tensor in network.tensors.items()}
    program = build_program(network.spec, len(images))
    found, whole = [], fused(program, rows(program.launches))
    assert {"norm_gemm", "attention_norm", "mlp"} <= {launch.op for launch in whole.launches}
    for one in (program, whole):
        bound = bind(one, tensors, network.scalars, cuda)
        bound.images.copy_(images)
        bound()
        found.append(bound.logits.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.02 * found[0].std().item())
    chosen = GraphSession(network, cuda, len(images), load_machine(name_here()))(images.cuda()).cpu()
    torch.testing.assert_close(chosen, found[0], rtol=0, atol=0.02 * found[0].std().item())
