"""Files of torch.save without torch.load: the same content, in memory and time that the file justifies."""

import copy
import io
import os
import pickle
import resource
import struct
import time
import zipfile
import zlib
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

from swin_quant.checkpoint import read_state_dict
from swin_quant.checkpoint.torch_file import read_pickled
from tests.helpers import refusals


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b) and not b.requires_grad
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


BASE = torch.arange(24.0).reshape(4, 6)
CONTENTS = {
    "types": {str(t): torch.ones(3).to(t) for t in (torch.half, torch.bfloat16, torch.double, torch.bool, torch.int8)},
    "views": {"a": BASE, "t": BASE.t(), "part": BASE[1:, 2:4], "none": torch.empty(0, 3), "one": torch.tensor(3)},
    "nested": {"list": [1, (2.5, None), [True, {"x": BASE}]], 7: "a" * 300, (1, "k"): -(2**70), "b": OrderedDict(a=1)},
    "a parameter": {"w": torch.nn.Parameter(torch.ones(2))},
    "an optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}},
        "param_groups": [{"betas": (0.9, 0.99), "params": [0]}],
    },
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", CONTENTS)
def test_the_content_is_that_of_torch_load(tmp_path, name, legacy):
    path = tmp_path / "x.pth"
    torch.save(CONTENTS[name], path, _use_new_zipfile_serialization=not legacy)
    read = read_pickled(path)
    assert same(torch.load(path, weights_only=True), read)
    if name == "views":
        read["a"][0, 1] = 99.0
        assert read["t"][1, 0] == 99.0, "views share their storage"


def test_torch_s_switch_against_unsafe_pickles_stays_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"a": BASE}, tmp_path / "x.pth")
    assert same(read_pickled(tmp_path / "x.pth"), {"a": BASE}) and os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"


def test_a_tensor_with_attributes_is_its_values(tmp_path):
    tensor = torch.ones(2)
    tensor.note = "mine"
    torch.save({"w": tensor, "set": {1, 2}}, tmp_path / "x.pth")
    read = read_pickled(tmp_path / "x.pth")
    assert torch.equal(read["w"], torch.ones(2)) and sorted(read["set"]) == [1, 2]


def packed(pickled: bytes, members=(), name="x") -> bytes:
    """An archive as torch.save writes it, from a pickle and storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{name}/data.pkl", pickled)
        archive.writestr(f"{name}/version", b"3\n")
        for member, data in members:
            archive.writestr(f"{name}/{member}", data)
    return buffer.getvalue()


def global_of(name: str) -> bytes:
    return f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def tensor(elements=1, size=(1,), stride=(1,), offset=0, kind="Float", key="0") -> bytes:
    """The opcodes of a tensor."""
    storage = b"(" + text("storage") + global_of(f"torch.{kind}Storage") + text(key) + text("cpu") + number(elements)
    shape = [b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (size, stride)]
    rest = b"\x89" + global_of("collections.OrderedDict") + b")R"
    rebuilt = global_of("torch._utils._rebuild_tensor_v2")
    return b"".join([rebuilt, b"(", storage, b"tQ", number(offset), *shape, rest, b"tR"])


def entry(value: bytes, key="w") -> bytes:
    return b"\x80\x02}(" + text(key) + value + b"u."


def refused(path, *words) -> None:
    """The refusal, which must take neither seconds nor gigabytes."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    message = refusals.refused(lambda: read_state_dict(path), *words)
    assert time.process_time() - started < 5  # seconds, also on a slow CPU
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert message.startswith(f"{path}: ") and len(message) < 600


def write(folder, content: bytes):
    (folder / "x.pth").write_bytes(content)
    return folder / "x.pth"


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("lies", [False, True])
def test_a_member_that_unpacks_is_refused_packed(tmp_path, method, lies):
    size, buffer = 50_000_000, io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("x/data.pkl", bytes(size))
    content = buffer.getvalue()
    if lies:  # about its unpacked size, in both headers
        content = content.replace(struct.pack("<L", size), struct.pack("<L", 100))
    refused(write(tmp_path, content), "compressed")


def doubled(one: bytes) -> bytes:
    """Sixty values, each of which holds the previous one twice."""
    return b"]q\x00" + b"".join(b"0" + one.replace(b"_", b"h%c" % i) + b"q%c" % (i + 1) for i in range(60))


def after(one: bytes, rest: bytes) -> bytes:
    """An archive with the result of `rest` when `one` is at place 0 of the memo."""
    return packed(entry(one + b"q\x000" + rest))


def encrypted(content: bytes) -> bytes:
    """The archive with its first member marked as encrypted in the directory."""
    flags = content.find(b"PK\x01\x02") + 8
    return content[:flags] + b"\x01" + content[flags + 1 :]


def shared_by(count: int) -> bytes:
    """An archive with `count` members whose bytes are those of one."""
    buffer = io.BytesIO(packed(entry(tensor(1024, (1024,))), [("data/0", bytes(4096))]))
    with zipfile.ZipFile(buffer, "a") as archive:
        first = archive.getinfo("x/data/0")
        for number in range(1, count):
            archive.filelist.append(other := copy.copy(first))
            other.filename = f"x/data/{number}"
        archive.writestr("x/more", b"")
    return buffer.getvalue()


STORAGE = b"(" + text("storage") + global_of("torch.FloatStorage") + text("0") + text("cpu") + number(2)
LISTED = b"](" + b"N" * 10_000 + b"e"
MADE_OF_IT = b"h\x00\x85R"
NAMES = b"".join(b"h\x00" + text(str(number)) + b"\x930" for number in range(500))
DOUBLED = {tuple: doubled(b"__\x86"), list: doubled(b"](__e")}
STORED = [("data/0", bytes(4))]
HOSTILE = {
    "a storage larger than its member": (packed(entry(tensor(10**9, (10**9,))), STORED), "record size (4 bytes)"),
    "a storage smaller than its member": (packed(entry(tensor()), [("data/0", bytes(8))]), "record size (8 bytes)"),
    "members in one place": (shared_by(50), "cut short or damaged"),
    "an encrypted member": (encrypted(packed(entry(tensor()), STORED)), "compressed"),
    "a tensor beyond its storage": (packed(entry(tensor(1, (2,))), STORED), "beyond its storage"),
    "an offset beyond its storage": (packed(entry(tensor(1, (1,), (1,), 1)), STORED), "beyond its storage"),
    "a negative offset": (packed(entry(tensor(1, (1,), (1,), -1)), STORED), "no shape"),
    "a stride of 0": (packed(entry(tensor(1, (10**9,), (0,)), "a._amax"), STORED), "a view [1000000000] of 1 stored"),
    "no elements in 2^62 rows": (packed(entry(tensor(1, (2**62, 2**62, 0), (1, 1, 1))), STORED), "no shape"),
    "a storage that is not there": (packed(entry(tensor(key="1")), STORED), "damaged"),
    "a storage by another name": (packed(entry(tensor(key="A")), [("data/a", bytes(4))]), "no storage"),
    "five gigabytes of zeros": (
        packed(entry(global_of("builtins.bytearray") + number(5 * 10**9) + b"\x85R")),
        "builtins.bytearray",
        "refused",
    ),
    "an opcode that makes them": (packed(entry(b"\x96" + struct.pack("<Q", 5 * 10**9))), "damaged"),
    "a place in the memo": (packed(entry(b"Nr" + struct.pack("<I", 2**32 - 1))), "no tensors"),
    "a key that hashes for ever": (packed(b"\x80\x02}(" + DOUBLED[tuple] + b"Nu."), "no plain value"),
    "a set that hashes for ever": (packed(entry(global_of("builtins.set") + b"]\x85R")), "no tensors"),
    "lists that double": (packed(entry(DOUBLED[list])), "too many"),
    "pairs that are one long list": (
        after(LISTED, global_of("collections.OrderedDict") + b"](" + b"h\x00" * 8000 + b"e\x85R"),
        "too many values",
    ),
    "one list in many sets": (
        after(LISTED, b"(" + (global_of("builtins.set") + MADE_OF_IT) * 5000 + b"l"),
        "too many values",
    ),
    "one list in many sizes": (
        after(LISTED, b"(" + (global_of("torch.Size") + MADE_OF_IT) * 5000 + b"l"),
        "too many values",
    ),
    "letters as sizes": (packed(entry(global_of("torch.Size") + text("7" * 100) + b"\x85R")), "a str where"),
    "one long key many times": (after(b"(" + b"N" * 20_000 + b"t", b"}" + b"h\x00Ns" * 5000), "no plain value"),
    "one long name many times": (after(text("a" * 1_000_000), NAMES + b"N"), "too many letters"),
    "five thousand tensors in each other": (
        after(
            global_of("torch._tensor._rebuild_from_type_v2"), b"h\x00" + b"(h\x00N" * 5000 + b")" + b"Nt" * 5000 + b"R"
        ),
        "a tensor that is none",
    ),
    "a list in itself": (packed(entry(b"]q\x00(h\x00e")), "contains itself"),
    "a thousand lists in each other": (packed(entry(b"(" * 1000 + b"l" * 1000)), "too deep"),
    "a number of 10,000 digits": (packed(entry(b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000)), "digits"),
    "text of 4 GB": (packed(entry(b"X" + struct.pack("<I", 2**32 - 1))), "damaged"),
    "an empty stack": (packed(b"\x80\x02ttttt000000."), "damaged"),
    "no end": (packed(b"\x80\x02}"), "damaged"),
    "a persistent id in text": (packed(entry(b"Pabc\n")), "PERSID"),
    "a persistent id with a tensor in it": (
        packed(entry(STORAGE + tensor(2, (2,)) + b"tQ"), [("data/0", bytes(8))]),
        "damaged",
    ),
    "an object of a class": (packed(b"\x80\x02(ios\nsystem\n."), "INST"),
    "an extension": (packed(entry(b"\x82\x01")), "EXT1"),
    "half a million opcodes": (packed(b"\x80\x02}" + b"N0" * 250_000 + b"."), "opcodes"),
    "a pickle of 20 MB": (packed(b"\x80\x02}" + bytes(20_000_000)), "numbers in its pickle"),
    "no pickle": (packed(b""), "damaged"),
    "two members of one name": (lambda: packed(entry(tensor()), [*STORED, *STORED]), "damaged"),
    "a comment": (packed(entry(tensor()), STORED)[:-2] + b"\x05\x00hello", "damaged"),
    "something before it": (b"PK\x03\x04" + packed(entry(tensor()), STORED), "damaged"),
    "something between its directory and its end": (
        packed(entry(tensor()), STORED)[:-22] + b"hidden" + packed(entry(tensor()), STORED)[-22:],
        "damaged",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path, name):
    content, *words = HOSTILE[name]
    refused(write(tmp_path, content() if callable(content) else content), *words)


def test_a_directory_of_megabytes_is_refused_unread(tmp_path):
    content = packed(entry(tensor()), STORED)
    start, end = content.find(b"PK\x01\x02"), content.find(b"PK\x05\x06")
    directory, tail = content[start:end] * 40_000, bytearray(content[end:])
    struct.pack_into("<L", tail, 12, len(directory))
    refused(write(tmp_path, content[:start] + directory + bytes(tail)), "its directory is not before its end")


def test_an_old_file_whose_storages_are_larger_than_it_is_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    content = (tmp_path / "x.pth").read_bytes()
    assert content.count(b"K\x03N") == 1  # elements, no view
    big = content.replace(b"K\x03N", b"\x8a\x05" + (10**10).to_bytes(5, "little") + b"N")
    refused(write(tmp_path, big), "damaged")
    refused(write(tmp_path, content.replace(b"K\x03N", b"K\x02N")), "damaged")
    refused(write(tmp_path, pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)), "damaged")


def test_places_beyond_32_bits_are_read_from_the_extra_field(tmp_path):
    content = packed(entry(tensor()), STORED)
    start = content.find(b"PK\x01\x02")
    directory, rest = bytearray(content[start:]), b""
    name = struct.unpack_from("<H", directory, 28)[0]
    sizes = struct.unpack_from("<2L", directory, 20)
    struct.pack_into("<2L", directory, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", directory, 30, 20)
    rest = (
        bytes(directory[: 46 + name]) + struct.pack("<2H2Q", 1, 16, sizes[1], sizes[0]) + bytes(directory[46 + name :])
    )
    end = bytearray(rest)
    struct.pack_into("<L", end, len(end) - 10, struct.unpack_from("<L", end, len(end) - 10)[0] + 20)
    path = write(tmp_path, content[:start] + bytes(end))
    assert torch.equal(torch.load(path, weights_only=True)["w"], read_state_dict(path)[0]["w"])


def test_a_storage_may_be_written_by_others_if_its_checksum_is_right(tmp_path):
    content = packed(entry(tensor()), [("data/0", struct.pack("<f", 2.5))])
    assert zlib.crc32(struct.pack("<f", 2.5)).to_bytes(4, "little") in content
    assert read_state_dict(write(tmp_path, content))[0]["w"].item() == 2.5


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "uint16", "quint8"])
def test_types_that_no_swin_has_are_named(tmp_path, dtype):
    kind, what = getattr(torch, dtype), "b._amax is not a dense tensor of a common type"
    made = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, kind) if dtype == "quint8" else torch.ones(2).to(kind)
    torch.save({"a.weight": torch.ones(1), "b._amax": made}, tmp_path / "x.pth")
    refused(tmp_path / "x.pth", what)
    if dtype != "quint8":
        save_file({"b._amax": made}, tmp_path / "x.safetensors")
        refused(tmp_path / "x.safetensors", f"{what} but a tensor of torch.{dtype}")


def test_a_safetensors_header_of_gigabytes_is_refused_unread(tmp_path):
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.write((2**31).to_bytes(8, "little"))
        file.truncate(2**32)
    refused(tmp_path / "x.safetensors", "header is too large")
