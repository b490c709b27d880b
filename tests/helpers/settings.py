"""Configs of small models, key by key, and nodes' settings changed one by one, as no policy would."""

from dataclasses import replace

from swin_quant.config import from_dict


def small_config(kind="swin", image=32, classes=10, **keys):
    """A model of 16 channels, two stages and windows of 4 for pictures of 32 x 32, keys replaced."""
    keys = {"PATCH_SIZE": 2, "EMBED_DIM": 16, "DEPTHS": [2, 2], "NUM_HEADS": [1, 2], "WINDOW_SIZE": 4, **keys}
    if kind == "swinv2":
        keys.setdefault("PRETRAINED_WINDOW_SIZES", [0] * len(keys["DEPTHS"]))
    tree = {"DATA": {"IMG_SIZE": image}, "MODEL": {"TYPE": kind, "NUM_CLASSES": classes, kind.upper(): keys}}
    return from_dict(tree, "test")


def change(node, **fields):
    """Change these fields of a node's setting."""
    node.setting = replace(node.setting, **fields)
