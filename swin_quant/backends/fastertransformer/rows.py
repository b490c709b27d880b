"""Rows that V1's norm between attention and MLP leaves out (docs/reference/weights.md, section 3.9).

Up to 256 channels its kernel takes four rows a block, and the number of blocks is rounded down. The last one to three
rows of a batch keep what lay there: the residual stream without attention, and the projection's int8 sums where the
MLP looks for the norm's result. Only a map of an odd side has such rows, and only in batches that four does not divide.
"""

from swin_quant.models.geometry import Geometry

ROWS = 4
WIDEST = 256


def computed_rows(rows: int, channels: int) -> int:
    """How many of the rows of a batch the kernel computes, from the first one on."""
    return rows // ROWS * ROWS if channels <= WIDEST else rows


def stages_with_lost_rows(g: Geometry, batch: int) -> list[int]:
    """The stages of a V1 in which a batch of so many pictures loses rows."""
    rows = {stage: batch * g.resolution(stage) ** 2 for stage in range(len(g.depths))}
    return [stage for stage, count in rows.items() if computed_rows(count, g.embed_dim * 2**stage) < count]
