"""A statistics file returns its counts to the bit, and none of its own claims is trusted; `tests/base/test_arrays.py`
has what is no array."""

import io
import json
import zipfile

import numpy as np
import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.observers import BINS
from swin_quant.quant.statistics import Statistics, join_sides
from swin_quant.quant.statistics_file import read_statistics, statistics_bytes

NAMES = ["layers.0.a_quantizer", "layers.0.b_quantizer", "é"]


def counted():
    random = np.random.default_rng(0)
    rows = []
    for index in range(2):
        counts = np.zeros(BINS, np.int64)
        counts[: 3000 - 900 * index] = random.integers(0, 2**40, 3000 - 900 * index)
        width = 2.0 ** (index - 3) / BINS
        rows.append(Statistics(counts, width, float(width * (2999.5 - 900 * index))))
    rows.append(Statistics(np.eye(1, BINS, dtype=np.int64)[0], 2.0**-100 / BINS, 0.0))  # a node that saw only zeros
    return {name: join_sides(row, rows[1]) for name, row in zip(NAMES, rows, strict=True)}


def parts_of(content):
    with np.load(io.BytesIO(content)) as whole:
        return {name: whole[name] for name in whole}


def file(tmp_path, **changes):
    """The file of `counted()`, with some parts replaced by arrays or bytes, or left out."""
    with zipfile.ZipFile(tmp_path / "x.stats.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in (parts_of(statistics_bytes(counted())) | changes).items():
            if value is not None:
                buffer = io.BytesIO()
                buffer.write(value) if isinstance(value, bytes) else np.save(buffer, value)
                archive.writestr(f"{name}.npy", buffer.getvalue())
    return tmp_path / "x.stats.npz"


def test_statistics_are_read_back_exactly(tmp_path):
    rows = counted()
    (tmp_path / "x.npz").write_bytes(statistics_bytes(rows))
    read = read_statistics(tmp_path / "x.npz", NAMES)
    assert list(read) == NAMES
    for name, found in read.items():
        for ours, theirs in zip((found, *found.sides), (rows[name], *rows[name].sides), strict=True):
            assert ours.counts.dtype == np.int64 and np.array_equal(ours.counts, theirs.counts)
            assert (ours.width, ours.largest) == (theirs.width, theirs.largest)


@pytest.mark.parametrize("width", [5e-324, 1e-300, 1e300, 0.3, 2.0**-200, 2.0**200, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_widths_are_those_of_a_histogram(tmp_path, width, side):
    parts = parts_of(statistics_bytes(counted()))
    parts["width"][0, side] = width
    largest = np.minimum(parts["largest"], parts["width"])
    with pytest.raises(SwinQuantError, match="is not a statistics file of this model: widths are none"):
        read_statistics(file(tmp_path, **parts | {"largest": largest}), NAMES)


GOOD = np.ones((3, 2, BINS), np.int64)
BROKEN = {
    "other nodes": {"names": np.frombuffer(json.dumps([*NAMES[:2], "è"]).encode(), np.uint8)},
    "more nodes": {"names": np.frombuffer(json.dumps([*NAMES, "more"]).encode(), np.uint8)},
    "no counts": {"counts": None},
    "floats": {"counts": GOOD.astype(np.float64)},
    "fewer bins": {"counts": GOOD[:, :, :-1]},
    "negative": {"counts": -GOOD},
    "no value": {"counts": 0 * GOOD},
    "too many": {"counts": GOOD * 2**60},
    "NaN": {"largest": np.array([[1.0, 0.0], [np.nan, 0.0], [0.0, 0.0]])},
    "a bomb": {"counts": bytes(2**26)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_damaged_files_are_refused_in_one_line(tmp_path, what):
    path = file(tmp_path, **BROKEN[what])
    with pytest.raises(SwinQuantError) as caught:
        read_statistics(path, NAMES)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and "calibrate again" in str(caught.value)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_without_a_bound_is_refused(tmp_path, method):
    path = file(tmp_path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "y.npz", "w", method) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    with pytest.raises(SwinQuantError, match="y.npz: .* compressed by another method than deflate"):
        read_statistics(tmp_path / "y.npz", NAMES)
