"""Models of timm in micro form, each captured once: torch takes a second for it."""

import copy
import functools
import json

import torch

from swin_quant.config import from_dict
from swin_quant.models import build_model

FAMILIES = {
    "resnet18": {"layers": [1, 1, 1, 1], "channels": [8, 16, 16, 16]},
    "resnet50": {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 16]},
    "deit_tiny_patch16_224": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "vit_small_patch16_224": {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "init_values": 0.1},
    "convnext_atto": {"depths": [1, 2, 1, 1], "dims": [8, 16, 16, 16]},
    "mobilenetv3_small_050": {},
}


def config(name, **options):
    given = {"ARCHITECTURE": name, "OPTIONS": json.dumps(options)}
    model = {"TYPE": "timm", "NAME": name, "NUM_CLASSES": 3, "DROP_PATH_RATE": 0.0, "TIMM": given}
    return from_dict({"DATA": {"IMG_SIZE": 32}, "MODEL": model}, "test")


@functools.cache
def _captured(name):
    torch.manual_seed(0)
    model = build_model(config(name, **FAMILIES[name]))
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("running_var"):
            tensor.uniform_(0.5, 2.0)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data.add_(0.2 * torch.randn(tensor.shape))
    return model


def family(name):
    """A copy of its model. Norms are as in a trained one: a new model's zeros and ones would fold to nothing."""
    return copy.deepcopy(_captured(name))
