"""An architecture of somebody else's: two linear layers, whose checkpoints may come with `net.` before each name."""

import torch

from swin_quant.config.families import Family
from swin_quant.config.values import need_numbers
from swin_quant.models.classifier import Classifier
from swin_quant.models.layers import LayerNorm
from swin_quant.models.registry import Architecture
from swin_quant.quant.linear import QuantLinear


class Toy(Classifier):
    def __init__(self, size, hidden, classes):
        super().__init__(size, 3, classes)
        self.norm = LayerNorm(3 * size * size)
        self.fc1 = QuantLinear(3 * size * size, hidden)
        self.fc2 = QuantLinear(hidden, classes)

    def forward(self, images):
        return self.fc2(torch.relu(self.fc1(self.norm(images.flatten(1)))))


def build(cfg):
    return Toy(cfg.DATA.IMG_SIZE, cfg.MODEL.TOY.HIDDEN, cfg.MODEL.NUM_CLASSES)


def check(cfg, source):
    need_numbers("MODEL.TOY.HIDDEN", cfg.MODEL.TOY.HIDDEN, 4096, source)


def rename(state):
    if not all(key.startswith("net.") for key in state):
        return state, []
    return {key.removeprefix("net."): value for key, value in state.items()}, ["net."]


FAMILY = Family("toy", {"HIDDEN": 16}, check, head=("fc2.weight", "fc2.bias"), rename=rename)
ARCHITECTURE = Architecture(FAMILY, build, blocks="fc*", pairs=(("norm", ("fc1",)),))
