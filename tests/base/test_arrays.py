"""Arrays in .npz and .npy: NumPy's files are read, and nothing else in them is trusted."""

import io
import zipfile

import numpy as np
import pytest

from swin_quant.base.arrays import read_arrays, write_arrays
from swin_quant.base.errors import SwinQuantError
from tests.helpers.refusals import refused

ARRAYS = {
    "images": np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4),
    "forward/layers.0": np.linspace(0, 1, 7),
    "half": np.float16([[1], [2]]),
    "labels": np.int64([3, 1]),
    "loss": np.float32(0.5),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.array([1, 2], ">f4"),
    "none": np.zeros((0, 3), np.float32),
}


def alike(found, wanted=ARRAYS):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].shape == np.shape(array) and np.array_equal(found[name], array)


def test_what_is_written_is_read_by_numpy_and_by_us(tmp_path):
    write_arrays(tmp_path / "x.npz", ARRAYS)
    alike(read_arrays(tmp_path / "x.npz"))
    with np.load(tmp_path / "x.npz", allow_pickle=False) as theirs:
        alike({name: theirs[name] for name in theirs.files})
    np.savez_compressed(tmp_path / "y.npz", **ARRAYS)
    alike(read_arrays(tmp_path / "y.npz"))


def test_a_folder_of_npy_is_read_sorted(tmp_path):
    for name, array in ARRAYS.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "d" / f"{name}.npy", array)
    alike(read_arrays(tmp_path / "d"), dict(sorted(ARRAYS.items())))
    (tmp_path / "empty").mkdir()
    refused(lambda: read_arrays(tmp_path / "empty"), "empty: holds no .npy")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def archive(path, **members: bytes):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
BAD = {
    "objects": (npy(PLAIN.replace("<f4", "|O")), "x is no array of plain numbers"),
    "python": (
        npy("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (2,), }"),
        "no array of plain",
    ),
    "a larger shape": (npy(PLAIN.replace("2", "99999999999"), bytes(8)), r"8 bytes are not \[99999999999\] of float32"),
    "cut off": (npy(PLAIN, bytes(7)), r"x: 7 bytes are not \[2\] of float32"),
    "not npy": (b"hello", "x is no array"),
    "empty": (b"", "x is no array"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_array_of_numbers_is_refused(tmp_path, case):
    data, reason = BAD[case]
    with pytest.raises(SwinQuantError, match=f"x.npz: is no .npz of arrays: .*{reason}"):
        read_arrays(archive(tmp_path / "x.npz", x=data))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.npy").write_bytes(data)
    refused(lambda: read_arrays(tmp_path / "d"), "x.npy: is no array")


def test_pickles_are_never_loaded(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], dtype=object), allow_pickle=True)
    refused(lambda: read_arrays(archive(tmp_path / "x.npz", x=buffer.getvalue())), "no array of plain numbers")


def test_a_file_that_is_missing_damaged_or_blown_up_is_named(tmp_path):
    refused(lambda: read_arrays(tmp_path / "no.npz"), "no.npz: cannot be read: No such file")
    (tmp_path / "x.npz").write_bytes(b"PK nothing")
    refused(lambda: read_arrays(tmp_path / "x.npz"), "x.npz: is no .npz of arrays")
    whole = archive(tmp_path / "bomb.npz", x=npy(PLAIN, bytes(8))).read_bytes()
    size = whole.rindex(b"PK\x01\x02") + 24  # size of the unpacked member, in the directory
    (tmp_path / "bomb.npz").write_bytes(whole[:size] + (2**31).to_bytes(4, "little") + whole[size + 4 :])
    refused(lambda: read_arrays(tmp_path / "bomb.npz"), "declares 2147483648 bytes: too many")
