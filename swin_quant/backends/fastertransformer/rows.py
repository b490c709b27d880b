"""Rows that V1's norm between attention and MLP leaves out (docs/reference/weights.md, section 3.9).

With up to 256 channels its kernel takes four rows a block, and the number of blocks is rounded down. The last one to
three rows of a batch keep their old content: the residual stream without attention, and the projection's int8 sums
where the MLP reads the norm's result. Only maps of odd side lose rows, and only in batches that are no multiple of
four.
"""

from swin_quant.models.geometry import Geometry

ROWS = 4
WIDEST = 256


def computed_rows(rows: int, channels: int) -> int:
    """The number of a batch's rows that the kernel computes, counted from the first."""
    return rows // ROWS * ROWS if channels <= WIDEST else rows


def stages_with_lost_rows(g: Geometry, batch: int) -> list[int]:
    """The stages of a V1 in which a batch of this many pictures loses rows."""
    rows = {stage: batch * g.resolution(stage) ** 2 for stage in range(len(g.depths))}
    return [stage for stage, count in rows.items() if computed_rows(count, g.embed_dim * 2**stage) < count]
