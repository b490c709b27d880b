"""State dicts of the Swins that publishers' libraries make: names and shapes at published sizes, without memory.

Microsoft's repository and detectron2 are no packages. Their names are those of timm 0.4, which took Microsoft's code,
and their buffers follow from window and map; both were compared with the repositories' modules, key by key.
"""

import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from swin_quant.base.compat import import_timm, import_torchvision
from swin_quant.checkpoint import OpenedCheckpoint
from tests.config.test_shipped import TABLE

torchvision, timm = import_torchvision(), import_timm()
import transformers  # noqa: E402  # it imports torchvision
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

MICROSOFT = list(TABLE)  # names of the configurations in Microsoft's repository, of V1 and V2
V1 = [name for name in MICROSOFT if name.startswith("swin_")]
# Repositories of Microsoft on huggingface.co, which transformers opens.
TRANSFORMERS = """
    swin-tiny-patch4-window7-224 swin-small-patch4-window7-224 swin-base-patch4-window7-224
    swin-base-patch4-window7-224-in22k swin-base-patch4-window12-384 swin-base-patch4-window12-384-in22k
    swin-large-patch4-window7-224 swin-large-patch4-window7-224-in22k swin-large-patch4-window12-384
    swin-large-patch4-window12-384-in22k
    swinv2-tiny-patch4-window8-256 swinv2-tiny-patch4-window16-256 swinv2-small-patch4-window8-256
    swinv2-small-patch4-window16-256 swinv2-base-patch4-window8-256 swinv2-base-patch4-window16-256
    swinv2-base-patch4-window12-192-22k swinv2-base-patch4-window12to16-192to256-22kto1k-ft
    swinv2-base-patch4-window12to24-192to384-22kto1k-ft swinv2-large-patch4-window12-192-22k
    swinv2-large-patch4-window12to16-192to256-22kto1k-ft swinv2-large-patch4-window12to24-192to384-22kto1k-ft
""".split()
# Other sizes that users train; windows of 7 to 24 at 224 to 384 pixels.
RESIZED = [
    f"{kind}_{size}_patch4_window{window}_{image}"
    for kind in ("swin", "swinv2")
    for size in ("tiny", "large")
    for window, image in ((7, 224), (14, 224), (8, 256), (16, 256), (10, 320), (12, 384), (24, 384))
]
TIMM = [name for part in ("", "_v2") for name in timm.list_models(module=f"swin_transformer{part}", pretrained=True)]
S3 = [name for name in TIMM if "_s3_" in name]
CR = timm.list_models(module="swin_transformer_v2_cr")
TORCHVISION = torchvision.models.list_models(include="swin*")
SIZES = {"tiny": (96, 3, 6), "small": (96, 3, 18), "base": (128, 4, 18), "large": (192, 6, 18)}  # width, heads, depth
_NAME = re.compile(
    r"(swin(?:v2)?)[-_](tiny|small|base|large)([-_]c24)?(?:[-_]patch4)?[-_]window(\d+)(?:to(\d+))?"
    r"[-_](?:\d+to)?(\d+)(.*)"
)


class Shapes(TorchFunctionMode):
    """Parameters are created without memory, and not initialised; buffers keep their values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.empty:
            return torch.empty(*args, **{**(kwargs or {}), "device": "meta"})
        name = getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and args and args[0].is_meta:
            return args[0]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Published:
    """The state_dict of one model, its kind and geometry by its name, the file that it is in, and what lies there."""

    publisher: str
    name: str
    state: dict[str, torch.Tensor]
    geometry: dict[str, Any] = field(default_factory=dict)
    config: Any = None

    def with_classes(self, classes: int) -> dict[str, torch.Tensor]:
        """The state_dict with a head of so many classes; 0: none."""
        head = re.compile(r"(head\.fc|head|classifier)\.(weight|bias)")
        found = {key: value for key, value in self.state.items() if not head.fullmatch(key)}
        if not classes:
            return {re.sub(r"^swin(v2)?\.", "", key): value for key, value in found.items()}
        old = {key: value for key, value in self.state.items() if head.fullmatch(key)}
        return found | {key: torch.empty(classes, *value.shape[1:], device="meta") for key, value in old.items()}

    def written(self, folder: Path, classes: int) -> Path:
        """A place for the file: as long as it would be, but without content; transformers' config.json beside it."""
        folder = folder / f"{self.name}-{classes}"
        folder.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            labels = {i: f"LABEL_{i}" for i in range(classes)}
            self.config.id2label, self.config.label2id = labels, {name: i for i, name in labels.items()}
            self.config.save_pretrained(folder)
        file = folder / ("model.safetensors" if self.config is not None else f"{self.name}.safetensors")
        file.touch()
        os.truncate(file, 1 << 33)
        return file


def parsed(name):
    """Model type, width, heads, depths, window, pretrained window, picture size and classes by a published name."""
    kind, size, c24, window, to, image, rest = _NAME.fullmatch(name).groups()
    width, heads, depth = SIZES[size]
    heads = 4 if c24 else heads
    found = {
        "TYPE": kind,
        "EMBED_DIM": width,
        "DEPTHS": [2, 2, depth, 2],
        "NUM_HEADS": [heads << i for i in range(4)],
        "WINDOW_SIZE": int(to or window),
        "IMG_SIZE": int(image),
        "NUM_CLASSES": 21841 if "22k" in rest and not re.search("to1k|ft_in1k", rest) else 1000,
    }
    return found | ({"PRETRAINED_WINDOW_SIZES": [12, 12, 12, 6] if to else [0] * 4} if kind == "swinv2" else {})


@cache
def timm_state(name, **options):
    with Shapes():
        return timm.create_model(name, **options).state_dict()


def arguments(geometry):
    """The arguments by which timm and transformers build a Swin of this geometry."""
    found = {
        "embed_dim": geometry["EMBED_DIM"],
        "depths": tuple(geometry["DEPTHS"]),
        "num_heads": tuple(geometry["NUM_HEADS"]),
        "window_size": geometry["WINDOW_SIZE"],
    }
    if geometry["TYPE"] == "swinv2":
        found["pretrained_window_sizes"] = tuple(geometry["PRETRAINED_WINDOW_SIZES"])
    return found


def of_timm(name):
    return Published("timm", name, timm_state(name), parsed(name) if name not in S3 else {})


def microsoft_names(state):
    """timm 0.4's names, which are Microsoft's: the downsample ends a stage, the head has no `fc`."""
    return {
        re.sub(r"^layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", key).replace(
            "head.fc.", "head."
        ): value
        for key, value in state.items()
    }


def of_microsoft(name, masks=True):
    """Microsoft's module stores what follows from window and map: indices, masks, coordinates."""
    geometry = parsed(name)
    builder = {"swin": "swin_tiny_patch4_window7_224", "swinv2": "swinv2_tiny_window8_256"}[geometry["TYPE"]]
    state = microsoft_names(timm_state(builder, img_size=geometry["IMG_SIZE"], **arguments(geometry)))
    for stage, depth in enumerate(geometry["DEPTHS"]):
        side = geometry["IMG_SIZE"] // 4 >> stage
        window = min(geometry["WINDOW_SIZE"], side)
        for block in range(depth):
            attention, tokens = f"layers.{stage}.blocks.{block}.attn", window**2
            state[f"{attention}.relative_position_index"] = torch.zeros(
                tokens, tokens, dtype=torch.int64, device="meta"
            )
            if block % 2 and side > window and masks:
                shape = (-(-side // window)) ** 2, tokens, tokens
                state[f"layers.{stage}.blocks.{block}.attn_mask"] = torch.empty(shape, device="meta")
            if geometry["TYPE"] == "swinv2":
                by = (geometry["PRETRAINED_WINDOW_SIZES"][stage] or window) - 1
                offsets = torch.arange(1 - window, window) * 8 / by
                offsets = offsets.sign() * (offsets.abs() + 1).log2() / 3
                table = torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), -1)
                state[f"{attention}.relative_coords_table"] = table[None]
    return Published("Microsoft", name, state, geometry)


def of_transformers(name):
    geometry = parsed(name)
    kind = {"swin": "Swin", "swinv2": "Swinv2"}[geometry["TYPE"]]
    config = getattr(transformers, f"{kind}Config")(image_size=geometry["IMG_SIZE"], **arguments(geometry))
    with Shapes():
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
    state = revert_weight_conversion(model, model.state_dict())  # the names that it writes
    return Published("transformers", name, state, geometry, config)


def of_openmmlab(name, outputs=(3,)):
    """mmpretrain's backbone; mmdetection's and mmsegmentation's modules name the parts alike."""
    from mmpretrain.models import backbones

    geometry = parsed(name)
    window, sizes = geometry["WINDOW_SIZE"], {"img_size": geometry["IMG_SIZE"], "out_indices": outputs}
    if geometry["TYPE"] == "swinv2":
        windows = [min(window, geometry["IMG_SIZE"] // 4 >> stage) for stage in range(4)]
        sizes |= {"window_size": windows, "pretrained_window_sizes": geometry["PRETRAINED_WINDOW_SIZES"]}
    else:
        sizes["stage_cfgs"] = {"block_cfgs": {"window_size": window}}
    module = getattr(backbones, {"swin": "SwinTransformer", "swinv2": "SwinTransformerV2"}[geometry["TYPE"]])
    arch = {"embed_dims": geometry["EMBED_DIM"], "depths": geometry["DEPTHS"], "num_heads": geometry["NUM_HEADS"]}
    with Shapes():
        theirs = module(arch if geometry["TYPE"] == "swin" else arch | {"extra_norm_every_n_blocks": 0}, **sizes)
    return Published("OpenMMLab", name, theirs.state_dict(), geometry)


def of_detectron2(name):
    """Its backbone has a norm for each output and no masks."""
    published = of_microsoft(name, masks=False)
    state = {key: value for key, value in published.state.items() if not key.startswith(("norm.", "head."))}
    width = published.geometry["EMBED_DIM"]
    norms = {f"norm{i}.{kind}": torch.empty(width << i, device="meta") for i in range(4) for kind in ("weight", "bias")}
    return Published("detectron2", name, state | norms, published.geometry)


def opened(file, weights):
    """The checkpoint of a file, as if these weights had been read from it."""
    checkpoint = OpenedCheckpoint(file)
    checkpoint._read[""] = weights
    return checkpoint
