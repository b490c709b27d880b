"""The packed operands are those of the model's fake-quant."""

import pytest
import torch

from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.spec import spec_for
from swin_quant.quant.fake_quant import fake_quant


def ties(shape: torch.Size, is_float8: bool) -> torch.Tensor:
    """Values halfway between two levels: of int8, and of float8, which has eight in an octave."""
    draws = torch.Generator().manual_seed(0)
    if not is_float8:
        return torch.randint(-127, 127, shape, generator=draws) + 0.5
    steps, octave = (torch.randint(*ends, shape, generator=draws) for ends in ((8, 16), (-4, 5)))
    return (steps + 0.5) * 2.0**octave


@pytest.mark.parametrize("policy", ["cuda", "cuda-fp8"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_weights_are_to_the_bit_those_of_fake_quant(calibrated, kind, policy):
    """On ties too, where a quotient in float64 may differ from fake-quant's in float32."""
    model = calibrated(kind, policy)
    linears = {name: one for name, one in model.named_modules() if name.endswith((".fc1", ".fc2", ".reduction"))}
    largest = 127 if policy == "cuda" else 448
    with torch.no_grad():
        for layer in linears.values():
            amax = layer._weight_quantizer.range_for(layer.weight)
            layer.weight.copy_(ties(layer.weight.shape, largest == 448) * (amax / largest))
            layer.weight[:, :1] = amax  # ranges per row stay
    packed = pack(model, spec_for(model))
    for name, layer in linears.items():
        node, levels = layer._weight_quantizer, packed.tensors[f"{name}.weight"].float()
        simulated = fake_quant(layer.weight, node.range_for(layer.weight), *node.grid)
        step = node.range_for(layer.weight) / largest
        assert torch.equal(levels * step, simulated), name
        scale = step.double().flatten() * layer._input_quantizer.range.double() / largest
        assert torch.equal(packed.tensors[f"{name}.scale"], scale.float().expand(len(levels))), name
