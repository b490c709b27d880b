"""Finding recipes: the shipped ones under configs/recipes/, a YAML file of the user's, the config's TRAIN and AUG."""

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.shipped import shipped_files
from swin_quant.base.yaml_file import read_yaml, shipped_or_file
from swin_quant.train.recipe import Recipe, recipe_from_dict


def builtin_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return [path.stem for path in shipped_files("recipes")]


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or one from a YAML file. UsageError names the file and what is wrong in it."""
    path = shipped_or_file(name_or_path, shipped_files("recipes"), "recipe")
    data = read_yaml(path, "recipe")
    if isinstance(data, dict):
        data.setdefault("name", path.stem)
    return recipe_from_dict(data, str(path))


def recipe_of_config(cfg: CfgNode) -> Recipe:
    """The recipe that the keys TRAIN.* and AUG.* of a config describe: Microsoft's float training.

    Its learning rates are for 512 pictures a step. UsageError for a scheduler or optimizer that is not offered.
    """
    train, aug, lr = cfg.TRAIN, cfg.AUG, cfg.TRAIN.BASE_LR
    if not lr > 0:
        raise UsageError(f"TRAIN.BASE_LR is {lr}, but must be above 0")
    tree = {
        "name": "config",
        "description": f"TRAIN and AUG of {cfg.MODEL.NAME}",
        "epochs": train.EPOCHS,
        "accumulation_steps": max(train.ACCUMULATION_STEPS, 1),
        "precision": cfg.AMP_OPT_LEVEL or ("O1" if cfg.AMP_ENABLE else "O0"),
        "optimizer": {
            "name": train.OPTIMIZER.NAME.lower(),
            "lr": lr,
            "lr_batch": 512,
            "weight_decay": train.WEIGHT_DECAY,
            "layer_decay": train.LAYER_DECAY,
            "clip_grad": train.CLIP_GRAD or None,
            "eps": train.OPTIMIZER.EPS,
            "betas": list(train.OPTIMIZER.BETAS),
            "momentum": train.OPTIMIZER.MOMENTUM,
        },
        "schedule": {
            "name": train.LR_SCHEDULER.NAME,
            "warmup_epochs": train.WARMUP_EPOCHS,
            "warmup_from": min(train.WARMUP_LR / lr, 1.0),
            "end": min(train.MIN_LR / lr, 1.0),
        },
        "augment": {
            "crop": "resized" if cfg.DATA.IMG_SIZE > 32 else "padded",
            "auto_augment": None if aug.AUTO_AUGMENT in ("", "none") else aug.AUTO_AUGMENT,
            "color_jitter": aug.COLOR_JITTER,
            "erase": aug.REPROB,
            "erase_mode": aug.REMODE,
            "erase_count": aug.RECOUNT,
            "mixup": aug.MIXUP,
            "cutmix": aug.CUTMIX,
            "mix_probability": aug.MIXUP_PROB,
            "mix_switch": aug.MIXUP_SWITCH_PROB,
            "mix_mode": aug.MIXUP_MODE,
            "label_smoothing": cfg.MODEL.LABEL_SMOOTHING,
        },
        "memory": {"checkpointing": train.USE_CHECKPOINT},
    }
    return recipe_from_dict(tree, "config (TRAIN, AUG)")
