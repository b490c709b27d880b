"""Files are whole or absent after any interruption; JSON from elsewhere is refused in one line."""

import errno
import functools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_quant.base.files import (
    atomic_write_bytes,
    compute_sha256,
    ensure_writable_dir,
    read_bounded,
    read_json,
    write_json,
)
from tests.helpers.refusals import refused


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_a_write_replaces_the_old_file_also_through_a_link_and_leaves_nothing_else(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("real", "link"):
        atomic_write_bytes(tmp_path / name, name.encode())
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == name.encode()
    assert names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "quota"),
        (KeyboardInterrupt(), None),
    ],
)
def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch, failure, words):
    target = tmp_path / "x.bin"
    target.write_bytes(b"old")

    def fail(descriptor):
        raise failure

    monkeypatch.setattr(os, "fsync", fail)
    if words:
        refused(lambda: atomic_write_bytes(target, b"new" * 1000), str(target), words)
    else:
        with pytest.raises(KeyboardInterrupt):
            atomic_write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["x.bin"]


def test_an_output_directory_is_made_with_all_its_levels_and_left_empty(tmp_path):
    made = ensure_writable_dir(tmp_path / "a" / "b" / "c")
    assert made.is_dir() and names(made) == []
    assert ensure_writable_dir(made) == made
    assert ensure_writable_dir(made, keep=False).is_dir(), "it was there before"
    ensure_writable_dir(tmp_path / "b" / "c", keep=False)
    assert not (tmp_path / "b").exists()


def test_an_impossible_output_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    refused(lambda: ensure_writable_dir(tmp_path / "file"), str(tmp_path / "file"), "it is a file")
    refused(lambda: ensure_writable_dir(tmp_path / "file" / "out"), "a file, not a directory")

    def fail(self, data):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", fail)
    refused(lambda: ensure_writable_dir(tmp_path), "read-only")


def test_json_keeps_order_and_cannot_say_infinity(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"b": [1.5, float("nan"), (float("inf"), "é")], "a": {"deep": float("-inf")}})
    assert path.read_text(encoding="utf-8").endswith("\n")
    assert list(read_json(path, "card").items()) == [("b", [1.5, None, [None, "é"]]), ("a", {"deep": None})]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b'{"a": 1', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "cannot be read"),
        (b"9" * 10_000, "cannot be read"),
    ],
)
def test_json_that_is_none_is_refused(tmp_path, content, words):
    (tmp_path / "x.json").write_bytes(content)
    refused(lambda: read_json(tmp_path / "x.json", "thing"), str(tmp_path / "x.json"), "thing", words)


def test_json_of_millions_of_values_is_refused_before_it_takes_their_memory(tmp_path):
    for content in (b"[" + b"[]," * 3_000_000 + b"0]", b'{"a":[' + b"0," * 3_000_000 + b"0]}"):
        (tmp_path / "x.json").write_bytes(content)
        refused(lambda: read_json(tmp_path / "x.json", "thing"), "more than the 1,048,576 values")


def test_devices_and_pipes_are_no_files_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        refused(functools.partial(read_bounded, path, "thing", 10), "not a regular file")
        refused(functools.partial(compute_sha256, path), "not a regular file")
    refused(lambda: read_bounded("a\0b", "thing", 10), "no file can have this name")
    refused(lambda: ensure_writable_dir(tmp_path / "a\0b"), "cannot be the output directory", "null")


def test_json_that_is_not_there_or_too_large_is_refused(tmp_path, monkeypatch):
    refused(lambda: read_json(tmp_path / "no.json", "thing"), "no such thing")
    refused(lambda: read_json(tmp_path, "thing"), "directory")
    monkeypatch.setattr("swin_quant.base.files.MAX_JSON_BYTES", 10)
    (tmp_path / "x.json").write_text("[1, 2, 3, 4, 5]")
    refused(lambda: read_json(tmp_path / "x.json", "thing"), "larger")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
def test_any_json_value_survives_the_file(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path, "value") == value
