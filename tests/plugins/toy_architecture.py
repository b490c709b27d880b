"""A third-party architecture with its own kind of layer; checkpoints may have `net.` before each name."""

from typing import Annotated

import torch
from torch import nn

from swin_quant.base.schema import within
from swin_quant.config.family import Family, check_values
from swin_quant.models.classifier import Architecture, Classifier
from swin_quant.models.layers import LayerNorm
from swin_quant.quant.layer import QuantizedLayer, QuantLinear


class QuantConv2d(QuantizedLayer, nn.Conv2d):
    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)
        self.add_nodes()

    def product(self, x, weight, bias=None):
        return self._conv_forward(x, weight, bias)

    def aligned(self, bias):
        return bias[:, None, None]


class Toy(Classifier):
    def __init__(self, size, hidden, classes):
        super().__init__((3, size, size), classes)
        self.conv = QuantConv2d(3, 8, kernel_size=4, stride=4)
        self.norm = LayerNorm(8 * (size // 4) ** 2)
        self.fc1 = QuantLinear(8 * (size // 4) ** 2, hidden)
        self.fc2 = QuantLinear(hidden, classes)

    def forward(self, images):
        x = self.norm(torch.relu(self.conv(images)).flatten(1))
        return self.fc2(torch.relu(self.fc1(x)))


def build(cfg):
    return Toy(cfg.DATA.IMG_SIZE, cfg.MODEL.TOY.HIDDEN, cfg.MODEL.NUM_CLASSES)


def check(cfg, source):
    check_values({"HIDDEN": Annotated[int, within(least=1, most=4096)]}, cfg.MODEL.TOY, source, "MODEL.TOY.")


def rename(state):
    if not all(key.startswith("net.") for key in state):
        return state, []
    return {key.removeprefix("net."): value for key, value in state.items()}, ["net."]


FAMILY = Family("toy", {"HIDDEN": 16}, check, head=("fc2.weight", "fc2.bias"), rename=rename)
ARCHITECTURE = Architecture(FAMILY, build, blocks="fc*", pairs=(("norm", ("fc1",)),))
