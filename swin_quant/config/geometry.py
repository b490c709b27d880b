"""Refuse configurations that no model can be built from; errors name the key, the value and the file."""

import re
from collections.abc import Callable
from typing import Annotated, Any

from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.base.schema import Must, one_of, within
from swin_quant.config import outputs
from swin_quant.config.defaults import architecture
from swin_quant.config.families import families
from swin_quant.config.family import check_values
from swin_quant.config.sides import SIZE
from swin_quant.config.values import leaves


def _spelt(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


_FILE = _spelt(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]{1,200}")
_FOLDER = _spelt(r"[^\x00-\x1f\ud800-\udfff]{0,200}")
_Rate = Annotated[float, within(least=0, below=1)]
_KINDS: dict[str, Any] = {
    "DATA.INTERPOLATION": Annotated[str, one_of(("bicubic", "bilinear", "lanczos", "nearest"))],
    "DATA.CACHE_MODE": Annotated[str, one_of(("no", "full", "part"))],
    "DATA.IMG_SIZE": SIZE,
    "DATA.SCORED": Annotated[int, within(least=0)],
    "DATA.BATCH_SIZE": Annotated[int, within(least=1, most=2**20)],
    "MODEL.NUM_CLASSES": Annotated[int, within(least=1, most=2**20)],
    "MODEL.DROP_RATE": _Rate,
    "MODEL.DROP_PATH_RATE": _Rate,
    "MODEL.LABEL_SMOOTHING": _Rate,
    "MODEL.NAME": Annotated[str, Must(_FILE, "a name for a file: no slashes, 1 to 200 characters")],
    **outputs.KINDS,
    "TAG": Annotated[str, Must(_FOLDER, "a name for a folder: up to 200 characters of UTF-8")],
}


def check_geometry(cfg: CfgNode, source: str) -> None:
    """Refuse values that no model can be built from; `source` is the file that the UsageError names."""
    kinds = {"MODEL.TYPE": Annotated[str, one_of(families())], **_KINDS}
    check_values(kinds, dict(leaves(cfg)), source)
    families()[cfg.MODEL.TYPE].check(cfg, source)


def check_channels(cfg: CfgNode) -> None:
    """UsageError for a model that does not take pictures as they are read, in three colours."""
    if (channels := architecture(cfg).get("IN_CHANS", 3)) != 3:
        raise UsageError(f"IN_CHANS is {channels}, but pictures are read in red, green and blue: it must be 3")
