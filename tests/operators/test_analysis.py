"""Which shapes follow the pictures, and what only training needs."""

from torch import nn

from swin_quant.operators.trace import trace, training_only, variations


def test_what_varies(tiny_model):
    model = tiny_model("swin", DROP_PATH_RATE=0.1)
    shape = (1, *model.input_shape)
    batch, size, height = variations(model, shape, trace(model, shape))
    assert batch.free and batch.calls > 10 and not size.free and "layers.0.blocks.0" in size.why and not height.free
    assert {"Dropout", "DropPath"} == set(training_only(model))
    free = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    assert all(one.free for one in variations(free, (1, 3, 8, 8), trace(free, (1, 3, 8, 8))))
