"""A statistics file returns its counts to the bit, and none of its own claims is trusted."""

import io
import json
import zipfile

import numpy as np
import pytest

from swin_quant.base.errors import SwinQuantError
from swin_quant.quant.observers import BINS
from swin_quant.quant.range_methods import RANGE_METHODS
from swin_quant.quant.ranges import search_range
from swin_quant.quant.statistics import Statistics, join_sides
from swin_quant.quant.statistics_file import read_peaks, read_statistics, statistics_bytes

NAMES = ["layers.0.a_quantizer", "layers.0.b_quantizer", "é"]


def counted():
    random = np.random.default_rng(0)
    rows = {}
    for index, name in enumerate(NAMES):
        counts = np.zeros(BINS, np.int64)
        counts[: 3000 - 900 * index] = random.integers(0, 2**40, 3000 - 900 * index)
        width = 2.0 ** (index - 3) / BINS
        rows[name] = Statistics(counts, width, float(width * (2999.5 - 900 * index)))
    rows[NAMES[2]] = Statistics(np.eye(1, BINS, dtype=np.int64)[0], 2.0**-100 / BINS, 0.0)  # a node that saw only zeros
    return rows


def file(tmp_path, **changes):
    """The file of `counted()`, with some parts replaced by arrays or bytes, or left out."""
    with np.load(io.BytesIO(statistics_bytes(counted()))) as whole:
        parts = {name: whole[name] for name in whole} | changes
    with zipfile.ZipFile(tmp_path / "x.stats.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in parts.items():
            if value is not None:
                buffer = io.BytesIO()
                buffer.write(value) if isinstance(value, bytes) else np.save(buffer, value)
                archive.writestr(f"{name}.npy", buffer.getvalue())
    return tmp_path / "x.stats.npz"


def test_statistics_are_read_back_exactly(tmp_path):
    made = counted()
    (tmp_path / "x.npz").write_bytes(statistics_bytes(made))
    read = read_statistics(tmp_path / "x.npz", NAMES)
    assert list(read) == NAMES
    for name, row in made.items():
        assert read[name].counts.dtype == np.int64 and np.array_equal(read[name].counts, row.counts)
        assert (read[name].width, read[name].largest) == (row.width, row.largest)
        for method in RANGE_METHODS:
            assert search_range(method, read[name], 4) == search_range(method, row, 4)


@pytest.mark.parametrize("width", [5e-324, 1e-300, 1e300, 0.3, 2.0**-200, 2.0**200, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_widths_are_those_of_a_histogram(tmp_path, width, side):
    rows = {name: join_sides(each, counted()[NAMES[1]]) for name, each in counted().items()}
    widths = np.array([[side.width for side in row.both_sides()] for row in rows.values()])
    widths[0, side] = width
    with np.load(io.BytesIO(statistics_bytes(rows))) as whole:
        parts = {name: whole[name] for name in whole}
    with pytest.raises(SwinQuantError, match="is not a statistics file of this model: widths are none"):
        read_statistics(
            file(tmp_path, **parts | {"width": widths, "largest": np.minimum(parts["largest"], widths)}), NAMES
        )


def test_signed_statistics_are_read_back_exactly(tmp_path):
    rows = {name: join_sides(each, counted()[NAMES[1]]) for name, each in counted().items()}
    (tmp_path / "x.npz").write_bytes(statistics_bytes(rows))
    for name, read in read_statistics(tmp_path / "x.npz", NAMES).items():
        for ours, theirs in zip((read, *read.sides), (rows[name], *rows[name].sides), strict=True):
            assert np.array_equal(ours.counts, theirs.counts)
            assert (ours.width, ours.largest) == (theirs.width, theirs.largest)


def test_largest_values_of_pictures_come_back_where_they_were_known(tmp_path):
    peaks = {NAMES[0]: [0.1, 0.5, 2.0], NAMES[2]: [0.0, 0.0, 0.0]}
    rounded = {name: np.array(each, np.float32).tolist() for name, each in peaks.items()}
    (tmp_path / "x.npz").write_bytes(statistics_bytes(counted(), peaks))
    assert read_peaks(tmp_path / "x.npz", NAMES, 3) == rounded
    assert read_statistics(tmp_path / "x.npz", NAMES).keys() == counted().keys()
    assert read_peaks(file(tmp_path), NAMES, 3) == {}


def test_a_file_of_before_signs_were_kept_has_no_sides(tmp_path):
    assert all(each.sides is None for each in read_statistics(file(tmp_path), NAMES).values())


def lie(shape, dtype="<i8"):
    """An array whose header claims more than it has."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + bytes(3 * BINS * 8)


GOOD = np.ones((3, BINS), np.int64)
BROKEN = {
    "other nodes": {"names": np.frombuffer(json.dumps([*NAMES[:2], "è"]).encode(), np.uint8)},
    "more nodes": {"names": np.frombuffer(json.dumps([*NAMES, "more"]).encode(), np.uint8)},
    "no counts": {"counts": None},
    "floats": {"counts": GOOD.astype(np.float64)},
    "fewer bins": {"counts": GOOD[:, :-1]},
    "in another order": {"counts": np.asfortranarray(GOOD)},
    "a header that lies": {"counts": lie((3, 2**50))},
    "a header that counts down": {"counts": lie((-3, BINS))},
    "a header of no Python": {"counts": lie((3, BINS)).replace(b", 'fortran", b" (\n'fortran")},
    "objects": {"width": np.array([object()] * 3)},
    "a pickle": {"width": b"cos\nsystem\n(S'true'\ntR."},
    "nothing": {"counts": b""},
    "negative": {"counts": -GOOD},
    "no value": {"counts": 0 * GOOD},
    "too many": {"counts": GOOD * 2**60},
    "NaN": {"largest": np.array([1.0, np.nan, 0.0])},
    "infinite": {"width": np.array([1.0, np.inf, 1.0])},
    "narrow": {"width": np.array([1e-9, 1.0, 1.0])},
    "a bomb": {"counts": bytes(2**26)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_damaged_files_are_refused_in_one_line(tmp_path, what):
    path = file(tmp_path, **BROKEN[what])
    with pytest.raises(SwinQuantError) as caught:
        read_statistics(path, NAMES)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and "calibrate again" in str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_damaged_bytes_are_noticed(tmp_path, seed):
    data = bytearray(statistics_bytes(counted()))
    random = np.random.default_rng(seed)
    content = bytes(data[: len(data) // 2]) if seed == 0 else data
    if seed:
        start = data.index(b"counts.npy") + 200
        content[random.integers(start, start + 20000)] ^= 0xFF
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(SwinQuantError, match="x.npz"):
        read_statistics(tmp_path / "x.npz", NAMES)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_without_a_bound_is_refused(tmp_path, method):
    path = file(tmp_path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "y.npz", "w", method) as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    with pytest.raises(SwinQuantError, match="y.npz: .* compressed by another method than deflate"):
        read_statistics(tmp_path / "y.npz", NAMES)
