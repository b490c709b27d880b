"""Planted risks are found, each by the evidence that shows it; a harmless model has none."""

import torch
from torch import nn

from swin_quant.operators.analysis import by_pictures, by_ranges, by_weights
from swin_quant.operators.trace import trace, training_only, variations
from swin_quant.quant.quantizer import Role, named_nodes


def kinds(found):
    return {advice.kind: advice for advice in found}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 6))


def test_what_weights_show():
    model = network()
    assert kinds(by_weights(model)) == {}
    with torch.no_grad():
        model[3].weight[2] = 0
        model[4].weight[1] *= 100
        model[2].bias[0] = 1e5
    found = kinds(by_weights(model))
    assert found["dead-channels"].nodes == ("3",) and found["outlier-weights"].nodes == ("4",)
    assert found["weights-beyond-half"].nodes == ("2.bias",) and found["weights-beyond-half"].warns


def test_what_pictures_show():
    model, images = network(), torch.randn(2, 3, 8, 8)
    assert kinds(by_pictures(model, images)) == {}
    with torch.no_grad():
        model[0].weight *= 1e6
        model[0].bias *= 0
        model[4].weight[3], model[4].bias[3] = 0, 0
        model[4].weight[1] *= 200
    found = kinds(by_pictures(model, images))
    assert found["beyond-half"].nodes == ("0",) and found["norm-variance"].nodes == ("2",)
    assert found["dead-channels"].nodes == ("4",) and "4" in found["outliers"].nodes
    assert "flat-norm" in kinds(by_pictures(model, torch.zeros(1, 3, 8, 8)))


def test_what_ranges_show(tiny_model):
    model = tiny_model("swin")
    assert kinds(by_ranges(model)) == {}
    nodes = named_nodes(model)
    for node in nodes.values():
        node.amax = 1.0
    norm = next(name for name, node in nodes.items() if node.role is Role.NORM_INPUT)
    nodes[norm].amax = 300.0
    last = [name for name, node in nodes.items() if node.role is Role.GEMM_INPUT][-1]
    nodes[last].amax = 1e5
    found = kinds(by_ranges(model))
    assert found["norm-variance"].nodes == (norm,) and found["beyond-half"].nodes == (last,)


def test_what_varies(tiny_model):
    model = tiny_model("swin", DROP_PATH_RATE=0.1)
    shape = (1, *model.input_shape)
    batch, size, height = variations(model, shape, trace(model, shape))
    assert batch.free and batch.calls > 10 and not size.free and "layers.0.blocks.0" in size.why and not height.free
    assert {"Dropout", "DropPath"} == set(training_only(model))
    free = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    assert all(one.free for one in variations(free, (1, 3, 8, 8), trace(free, (1, 3, 8, 8))))
