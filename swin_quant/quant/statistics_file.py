"""A calibration's statistics in a small file, for the report, and for ranges at other bits without pictures.

A compressed .npz: `names` of the nodes (JSON as uint8), `counts` int64 [nodes, 2, BINS], `width` and `largest` float64
[nodes, 2], for values below zero and all others. The file is not trusted: what it unpacks is bounded, and shape and
type of every part are checked.
"""

import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swin_quant.base.arrays import unpack_arrays
from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_bounded
from swin_quant.base.reading import reads
from swin_quant.quant.observers import BINS
from swin_quant.quant.statistics import Statistics, join_sides

SUFFIX = ".stats.npz"
MAX_BYTES = 64 * 1024 * 1024
_UNPACKED = 256 * 1024 * 1024
_ENTRY, _MAX_ENTRIES = b"PK\x01\x02", 100  # in a zip's directory: zipfile makes 600 bytes of 46; four are needed
_WIDTHS = 2.0**-100 / BINS, 2.0**128 / BINS  # powers of two, as in histograms of float32
_PARTS: dict[str, tuple[str, tuple[int, ...]]] = {  # the type, and the shape for a side of a node
    **{"names": ("uint8", ()), "counts": ("int64", (BINS,))},
    **{"width": ("float64", ()), "largest": ("float64", ())},
}
_LARGEST_COUNT = 2**62  # of a node's values: sums of counts stay within int64


def statistics_bytes(statistics: Mapping[str, Statistics]) -> bytes:
    """The file's content: the same bytes for the same statistics."""
    sides = [each.both_sides() for each in statistics.values()]
    parts: dict[str, Any] = {"names": np.frombuffer(json.dumps(list(statistics)).encode(), np.uint8)}
    for key in ("counts", "width", "largest"):
        parts[key] = np.array([[getattr(side, key) for side in both] for both in sides])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **parts)
    return buffer.getvalue()


@reads("statistics file")
def read_statistics(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, Statistics]:
    """The statistics of the nodes `names`, in their order. SwinQuantError if the file is damaged or has other nodes."""
    shape, listed = (len(names), 2), json.dumps(list(names)).encode()
    data = read_bounded(path, "statistics file", MAX_BYTES)
    try:
        if data.count(_ENTRY) > _MAX_ENTRIES:
            raise ValueError("it has too many parts")
        arrays = unpack_arrays(io.BytesIO(data), len(data), _UNPACKED)
        for name, (dtype, wanted) in _PARTS.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise ValueError(f"it has no {name} of {dtype}")
            if name != "names" and arrays[name].shape != (*shape, *wanted):
                raise ValueError(f"{name} has another shape")
        if arrays["names"].tobytes() != listed:
            raise ValueError("it is of the nodes of another model")
        counts, width, largest = (arrays[name] for name in ("counts", "width", "largest"))
        total = counts.astype(np.float64).reshape(len(counts), -1).sum(axis=1)
        if (counts < 0).any() or not ((total > 0) & (total < _LARGEST_COUNT)).all():
            raise ValueError("counts are negative, missing or too many")
        if not ((np.frexp(width)[0] == 0.5) & (width >= _WIDTHS[0]) & (width <= _WIDTHS[1])).all():
            raise ValueError("widths are none of a histogram")
        if not ((largest >= 0) & (largest <= width * BINS)).all():
            raise ValueError("widths and largest values contradict each other")
    except ValueError as error:
        raise SwinQuantError(f"{path}: is not a statistics file of this model: {error}; calibrate again") from error
    return {
        name: join_sides(*(Statistics(counts[i, k], float(width[i, k]), float(largest[i, k])) for k in (0, 1)))
        for i, name in enumerate(names)
    }
