"""How much memory a configuration that was read off a file asks for: no more than the file itself can account for.

A shape takes a few bytes to write and gigabytes to build, so what a model would hold is counted before it is made.
"""

from pathlib import Path

from yacs.config import CfgNode

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import parts_of
from swin_quant.config import architecture

_MOST_TABLES = 2**29  # elements of indices, coordinates and masks, which follow from the geometry and need no file


def check_footprint(cfg: CfgNode, file: Path) -> None:
    """SwinQuantError where the model of `cfg` has more weights than `file` has bytes, or tables beyond any use."""
    weights, tables = _elements(cfg)
    if weights > sum(part.stat().st_size for part in (file, *parts_of(file))) or tables > _MOST_TABLES:
        raise SwinQuantError(
            f"{file}: is a damaged checkpoint of a Swin: its keys and shapes are of a model of {weights:,} weights and "
            f"tables of {tables:,} entries, which the file cannot hold"
        )


def _elements(cfg: CfgNode) -> tuple[int, int]:
    """The elements of the matrices of a Swin, and of what is computed from its geometry."""
    a, weights, tables = architecture(cfg), 0, 0
    side, width = cfg.DATA.IMG_SIZE // a.PATCH_SIZE, a.EMBED_DIM
    for depth in a.DEPTHS:
        length = min(a.WINDOW_SIZE, side) ** 2
        weights += depth * width * (4 * width + 2 * int(width * a.MLP_RATIO))
        tables += depth * length**2 + depth // 2 * side**2 * length
        side, width = side // 2, width * 2
    return weights, tables
