"""The scalar arguments of FasterTransformer's torch classes and TensorRT plugins.

See docs/reference, sections 3.1 and 4.2. The classes take them by order, the plugins by name.
"""

import math
from typing import Any

from swin_quant.backends.fastertransformer.slots import Form, Slot, head_dim
from swin_quant.models.geometry import Geometry

DEFAULT_SCALE = 1.0  # qk_scale that stands for head_dim ** -0.5
OPS = {True: "SwinTransformerINT8", False: "SwinTransformer"}
PLUGINS = {True: "CustomSwinTransformerINT8Plugin", False: "CustomSwinTransformerPlugin"}


def is_default_scale(g: Geometry) -> bool:
    """Whether attention has the kernels' default scale."""
    return g.qk_scale is None or math.isclose(g.qk_scale, head_dim(g) ** -0.5, rel_tol=1e-6)


def op_arguments(g: Geometry, form: Form, int8_mode: int | None, max_batch: int) -> dict[str, Any]:
    """The arguments of `Class(weights, ...)` after the weights, in order; lists become int32 tensors on the CPU."""
    scalars = {
        "max_batch": max_batch,
        "img_size": g.image_size,
        "patch_size": g.patch_size,
        "in_chans": g.in_chans,
        "embed_dim": g.embed_dim,
        "window_size": g.window,
        "ape": g.ape,
        "patch_norm": g.patch_norm,
        "layer_num": len(g.depths),
        "mlp_ratio": float(g.mlp_ratio),
        "qkv_bias": g.qkv_bias,
        "qk_scale": DEFAULT_SCALE if g.qk_scale is None or is_default_scale(g) else float(g.qk_scale),
        "version": form.version,
    }
    mode = {"int8_mode": int8_mode} if form.int8 else {}
    return {**mode, "depths": list(g.depths), "num_heads": list(g.heads), **scalars}


def plugin(g: Geometry, form: Form, int8_mode: int | None, max_batch: int, entries: list[Slot]) -> dict[str, Any]:
    """The plugin's name, its scalar fields [name, type, value] and the element count of each weight field."""
    arguments = op_arguments(g, form, int8_mode, max_batch)
    lists = {name: arguments.pop(name) for name in ("depths", "num_heads")}
    renamed = {"max_batch_size" if name == "max_batch" else name: value for name, value in arguments.items()}
    floats = ("mlp_ratio", "qk_scale")
    scalars = [
        [name, "float32" if name in floats else "int32", value if name in floats else int(value)]
        for name, value in renamed.items()
    ]
    return {
        "name": PLUGINS[form.int8],
        "version": "1",
        "namespace": "",
        "output": [-1, g.embed_dim * 2 ** (len(g.depths) - 1), 1, 1],
        "fields": scalars + [[name, "int32", value] for name, value in lists.items()],
        "weights": {slot.field: math.prod(slot.shape) for slot in entries},
    }


def parse_geometry(arguments: dict[str, Any], classes: int) -> Geometry:
    """The geometry that an op's arguments describe; only the head tells `classes`."""
    scale = arguments["qk_scale"]
    return Geometry(
        image_size=arguments["img_size"],
        patch_size=arguments["patch_size"],
        in_chans=arguments["in_chans"],
        classes=classes,
        embed_dim=arguments["embed_dim"],
        depths=tuple(arguments["depths"]),
        heads=tuple(arguments["num_heads"]),
        window=arguments["window_size"],
        mlp_ratio=arguments["mlp_ratio"],
        qkv_bias=arguments["qkv_bias"],
        qk_scale=None if scale == DEFAULT_SCALE else scale,
        drop=0.0,
        drop_path=0.0,
        ape=arguments["ape"],
        patch_norm=arguments["patch_norm"],
        pretrained_windows=(0,) * len(arguments["depths"]),
    )
