"""The tree of keys and defaults of FasterTransformer (docs/reference, section 7.2), and a section a family of models.

Families are Swin's two, timm's, and those that installed packages announce.
"""

from functools import cache
from typing import Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.extras import announced
from swin_quant.base.progress import log
from swin_quant.config import outputs
from swin_quant.config.family import Family
from swin_quant.config.swin import SWIN, SWINV2
from swin_quant.config.timm import TIMM

_ROOT: dict[str, Any] = {
    "BASE": [""],
    "DATA": {
        "BATCH_SIZE": 128,
        "DATA_PATH": "",
        "DATASET": "imagenet",
        "IMG_SIZE": 224,
        "INTERPOLATION": "bicubic",
        "MEAN": [0.485, 0.456, 0.406],  # ImageNet's, of red, green and blue
        "STD": [0.229, 0.224, 0.225],
        "UPRIGHT": False,
        "ZIP_MODE": False,
        "CACHE_MODE": "part",
        "PIN_MEMORY": True,
        "SCORED": 0,
        "NUM_WORKERS": 8,
        "MASK_PATCH_SIZE": 32,
        "MASK_RATIO": 0.6,
    },
    "MODEL": {
        "TYPE": "swin",
        "NAME": "swin_tiny_patch4_window7_224",
        "PRETRAINED": "",
        "RESUME": "",
        "WEIGHTS": "",
        "NUM_CLASSES": 1000,
        "DROP_RATE": 0.0,
        "DROP_PATH_RATE": 0.1,
        "LABEL_SMOOTHING": 0.1,
        "OUTPUT_KIND": outputs.LOGITS,
        "FEATURES": outputs.DEFAULTS,
    },
    "TRAIN": {
        "START_EPOCH": 0,
        "EPOCHS": 300,
        "WARMUP_EPOCHS": 20,
        "WEIGHT_DECAY": 0.05,
        "BASE_LR": 5e-4,
        "WARMUP_LR": 5e-7,
        "MIN_LR": 5e-6,
        "CLIP_GRAD": 5.0,
        "AUTO_RESUME": True,
        "ACCUMULATION_STEPS": 1,
        "USE_CHECKPOINT": False,
        "LAYER_DECAY": 1.0,
        "LR_SCHEDULER": {
            "NAME": "cosine",
            "DECAY_EPOCHS": 30,
            "DECAY_RATE": 0.1,
            "WARMUP_PREFIX": True,
            "GAMMA": 0.1,
            "MULTISTEPS": [],
        },
        "OPTIMIZER": {"NAME": "adamw", "EPS": 1e-8, "BETAS": (0.9, 0.999), "MOMENTUM": 0.9},
    },
    "AUG": {
        "COLOR_JITTER": 0.4,
        "AUTO_AUGMENT": "rand-m9-mstd0.5-inc1",
        "REPROB": 0.25,
        "REMODE": "pixel",
        "RECOUNT": 1,
        "MIXUP": 0.8,
        "CUTMIX": 1.0,
        "CUTMIX_MINMAX": None,
        "MIXUP_PROB": 1.0,
        "MIXUP_SWITCH_PROB": 0.5,
        "MIXUP_MODE": "batch",
    },
    "TEST": {"CROP": True, "CROP_RATIO": 0.875, "SHAPE": "square", "SEQUENTIAL": False, "SHUFFLE": False},
    "AMP_ENABLE": True,
    "AMP_OPT_LEVEL": "",
    "ENABLE_AMP": False,
    "OUTPUT": "",
    "TAG": "default",
    "SAVE_FREQ": 1,
    "PRINT_FREQ": 10,
    "SEED": 0,
    "LOCAL_RANK": 0,
    "EVAL_MODE": False,
    "THROUGHPUT_MODE": False,
    "FUSED_WINDOW_PROCESS": False,
    "FUSED_LAYERNORM": False,
}
ENTRY_POINTS = "swin_quant.architectures"  # the group of an installed package's ARCHITECTURE
BUILT_IN = (SWIN, SWINV2)  # every configuration and every run card has their keys
_registered: dict[str, Family] = {}


def defaults() -> dict[str, Any]:
    """Every key with its default, including the sections of the model families."""
    sections = {family.section: dict(family.defaults) for family in families().values()}
    return {**_ROOT, "MODEL": {**_ROOT["MODEL"], **sections}}


def default_config() -> CfgNode:
    """The tree of docs/reference, section 7.2, as a fresh, unfrozen node.

    Keys of ours: DATA.MEAN, DATA.STD and TEST.CROP_RATIO, which differ in checkpoints of timm and Hugging Face;
    DATA.SCORED scores so many pictures of a split, a seeded sample (0: all);
    DATA.UPRIGHT turns pictures as their EXIF says; TEST.SHAPE, MODEL.OUTPUT_KIND and MODEL.FEATURES give the input and
    output of a backbone; MODEL.WEIGHTS chooses among the sets of weights in a file (ema, raw, a name; "" as timm's
    loader). SWIN_MLP, SWIN_MOE, SIMMIM and TRAIN.MOE are left out: no model reads them, and setting them is an error.
    """
    return CfgNode(defaults())


def architecture(cfg: CfgNode) -> CfgNode:
    """The section of the model in use: MODEL.SWIN, MODEL.SWINV2, or another family's. UsageError for no known one."""
    if (family := families().get(cfg.MODEL.TYPE)) is None:
        raise UsageError(f"MODEL.TYPE is {cfg.MODEL.TYPE!r:.40}, but must be one of {', '.join(families())}")
    return cfg.MODEL[family.section]


def families() -> dict[str, Family]:
    """Every family by its name: the built-in ones first."""
    return {**_discovered(), **_registered}


def register_family(family: Family) -> None:
    """Add a family, for this process. UsageError if another one has its name."""
    if families().get(family.name, family) != family:
        raise UsageError(f"architecture {family.name!r}: there is one of that name already: choose another")
    _registered[family.name] = family


@cache
def _discovered() -> dict[str, Family]:
    found = {family.name: family for family in (*BUILT_IN, TIMM)}
    for who, architecture in announced(ENTRY_POINTS, "Architecture", _has_family):
        if found.setdefault(architecture.family.name, architecture.family) != architecture.family:
            log.warning("%s: left out, another architecture is called %s", who, architecture.family.name)
    return found


def _has_family(found: Any) -> bool:
    return isinstance(getattr(found, "family", None), Family)
