"""The size of a model's pictures: the side of a square, or height and width."""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from swin_quant.base.schema import Must, within

Size: TypeAlias = int | Sequence[int]
_Side = Annotated[int, within(least=1, most=8192)]
SIZE: Any = _Side | Annotated[list[_Side], Must(lambda both: len(both) == 2, "a side, or height and width")]


def sides(size: Size) -> tuple[int, int]:
    """Height and width."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def shortest(size: Any) -> Any:
    """One number for a square given by both sides; anything else unchanged."""
    return size[0] if isinstance(size, Sequence) and len(size) == 2 and size[0] == size[1] else size


def shown(size: Size) -> str:
    """`192 x 224`."""
    return " x ".join(map(str, sides(size)))


def compute_map_size(size: Size, patch: int, stage: int) -> tuple[int, int]:
    """Height and width of a Swin's token map in a stage."""
    height, width = sides(size)
    return height // patch >> stage, width // patch >> stage


def clipped(window: int, size: Size) -> tuple[int, int]:
    """The window on a map of this size: each side as long as the map's at most, as in timm."""
    height, width = sides(size)
    return min(window, height), min(window, width)
