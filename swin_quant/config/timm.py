"""The keys of any other model of timm: its name, and the arguments of its builder."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.schema import Must
from swin_quant.config.family import Family, check_values, need
from swin_quant.config.sides import shortest

HEADS = ("fc", "head.fc", "classifier", "head", "last_linear", "head.l")
# Options of timm's builders that read files, or that other keys of the config set.
_NOT_OPTIONS = frozenset(
    "pretrained pretrained_cfg pretrained_cfg_overlay pretrained_strict checkpoint_path cache_dir features_only "
    "num_classes scriptable exportable no_jit in_chans drop_path_rate drop_rate".split()
)
CROP_RATIO = 0.875  # timm's defaults, of its PretrainedCfg
_DATA = {"interpolation": "bicubic", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_LONGEST = 4096
_LARGEST = 2**14  # channels, pixels, blocks: more than any model has is a typing error, and would take all memory
_KINDS: dict[str, Any] = {
    "ARCHITECTURE": Annotated[
        str, Must(lambda text: text.replace("_", "a").isalnum() and len(text) < 200, "a name of timm's, as resnet50")
    ],
    "OPTIONS": Annotated[str, Must(lambda text: len(text) <= _LONGEST, f"of at most {_LONGEST} characters")],
}


def named(name: str | Path) -> str | None:
    """The name of a model of timm where a configuration is called `timm:NAME`; None for any other."""
    kind, _, name = str(name).partition(":")
    return name if kind == "timm" else None


def read_timm_config(name: str) -> dict[str, Any]:
    """The configuration of timm's model of that name, with timm's preparation of pictures. UsageError if there is none.

    A tag (`resnet50.a1_in1k`) chooses the weights whose preprocessing is taken.
    """
    from swin_quant.base.compat import import_timm  # takes seconds, too long for --help

    timm = import_timm()
    architecture = name.partition(".")[0]
    tags = [each.partition(".")[2] for each in timm.list_models(f"{architecture}.*", pretrained=True)]
    if not timm.is_model(architecture) or ("." in name and name.partition(".")[2] not in tags):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        others = [f"{architecture}.{tag}" for tag in tags] or close or timm.list_models("resnet*")
        raise UsageError(f"timm:{name}: timm has no such model; it has {listed(others)}")
    pretrained = timm.get_pretrained_cfg(name if tags else architecture)
    published = pretrained.to_dict() if pretrained else {}
    model = {"TYPE": "timm", "NAME": name, "DROP_PATH_RATE": 0.0, "TIMM": {"ARCHITECTURE": architecture}}
    model["NUM_CLASSES"] = published.get("num_classes") or 1000
    return {"MODEL": model, **prepared({"input_size": (3, 224, 224), **published})}


def prepared(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing in a `pretrained_cfg` of timm, unchecked, by dotted keys. Absent keys get timm's defaults,
    except for the size, which is the model's own. A picture that is squashed whole is not cropped."""
    size, ratio = pretrained.get("input_size"), pretrained.get("crop_pct")
    ratio = CROP_RATIO if ratio in (None, 0) else ratio
    squashes = pretrained.get("crop_mode") == "squash"
    named = _DATA | {key: value for key, value in pretrained.items() if key in _DATA and value is not None}
    if isinstance(size, list | tuple) and len(size) == 3:  # channels, height, width; anything else is refused
        size = shortest(list(size[1:]))
    return {
        **({} if size is None else {"DATA.IMG_SIZE": size}),
        **{f"DATA.{key.upper()}": list(value) if isinstance(value, tuple) else value for key, value in named.items()},
        "TEST.CROP": not (squashes and ratio == 1),
        "TEST.CROP_RATIO": ratio,
        "TEST.SHAPE": "squashed" if squashes and ratio != 1 else "square",
    }


def read_builder_options(cfg: CfgNode, source: str) -> dict[str, Any]:
    """The arguments of timm's builder that no other key sets. UsageError names `source`."""
    text = cfg.MODEL.TIMM.OPTIONS or "{}"
    try:
        options = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        need(False, source, f"MODEL.TIMM.OPTIONS is not JSON ({reason}): write '{{\"depth\": 6}}', say")
    need(isinstance(options, dict), source, f"MODEL.TIMM.OPTIONS must be a mapping in JSON, not {text:.60}")
    refused = [key for key in options if key in _NOT_OPTIONS]
    need(not refused, source, f"MODEL.TIMM.OPTIONS: {', '.join(refused)} is set elsewhere, or cannot be: leave it out")
    large = [key for key, value in options.items() if any(abs(number) > _LARGEST for number in _numbers(value))]
    need(not large, source, f"MODEL.TIMM.OPTIONS: {', '.join(large)} is beyond {_LARGEST}, more than any model has")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif isinstance(value, int | float):
        yield value


def _check(cfg: CfgNode, source: str) -> None:
    check_values(_KINDS, cfg.MODEL.TIMM, source, "MODEL.TIMM.")
    read_builder_options(cfg, source)


TIMM = Family(
    "timm",
    {"ARCHITECTURE": "resnet50", "OPTIONS": "", "QUANTIZE_STEM": True},
    _check,
    derived=(".num_batches_tracked",),
    head=tuple(f"{head}.{kind}" for head in HEADS for kind in ("weight", "bias")),
)
