"""Damage to valid files, repeatable by a seed: bits, lengths, numbers at their limits, parts dropped, swapped, renamed.

Pure functions of bytes and a random.Random. `mutated` goes down into formats (containers.py), a few levels at random.
"""

import random
import re
import struct
from collections.abc import Callable

from containers import PROTOBUF, Container, Part, parts_of

Files = dict[str, bytes]
Damage = Callable[[random.Random, bytes, bytes], bytes]

_LONGEST = 1 << 20  # bytes: large enough for repeated parts, and still written in milliseconds

_EDGES = [0, 1, 2, 3, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
_REALS = (0.0, -0.0, -1.0, 1e-9, 5e-324, 2.0**-149, 2.0**-126, 65504.0, 65520.0, 3.5e38, 1e300, 1.8e308, -1e308,
          float("inf"), float("-inf"), float("nan"))  # fmt: skip
# Names of types, by writer: another name of the same kind fits, and changes the meaning of bytes.
_KINDS = [kinds.encode().split() for kinds in (
    "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL F8_E4M3 U64", "<f8 <f4 <f2 <i8 <i4 |i1 |u1 <u8 |b1 >f4 <c16 |O",
    "DoubleStorage FloatStorage HalfStorage BFloat16Storage LongStorage IntStorage CharStorage ByteStorage BoolStorage "
    "QInt8Storage ComplexFloatStorage UntypedStorage", "Float64 Float32 Float16 BFloat16 Int64 Int8 UInt8 Bool",
    "float64 float32 float16 bfloat16 int8 int4 fp8 uint8",
)]  # fmt: skip
_NUMBERS = (
    b"0 -0 -1 1 2 7 255 65535 65536 2147483647 2147483648 4294967296 9223372036854775807 9223372036854775808 .5 0.5 "
    b"18446744073709551616 99999999999999999999 1e9 1e308 1e400 -1e400 1e-320 nan NaN inf -Infinity 0x10 1_0 1:1:1"
).split() + [b"9" * 5000, b"1" + b"0" * 400, "٣".encode(), b" ", b""]
_VALUES = (
    b'null true false 0 -1 0.5 1e999 NaN "" [] {} [[]] {"a":1} "\\ud800" "\\u0000" "../x" "/etc/passwd" "nan" "x\\ny" '
    b'"\\u001b[31m" "\\u202e" [0,0,0,0] [1e9] 99999999999999999999 "\xff" "None"'
).split() + [b'"' + b"x" * 70000 + b'"', b"[" * 3000 + b"]" * 3000, b'{"a":' * 200 + b"1" + b"}" * 200, b"9" * 5000]
# fmt: off
_TOKENS = [
    b"\x00", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b"\x1b[31m", b"a" * 70000,
    "\u202e".encode(), b"<<: *x", b"&x ", b"*x", b"!!python/object/apply:os.system ['touch owned']", b"!!binary x",
    b"? [a]: b", b"---\n", b"- " * 40, b"[" * 60, b"{a: " * 40, b"../", b"../../owned", b"/", b"\\", b"'", b'"',
    b": ", b", ", b"#", b"|\n", b"cos\nsystem\n(X\x0b\x00\x00\x00touch ownedtR", b"(i__main__\nx\n", b"###",
]
_NAMES = [
    b"", b"../owned", b"/tmp/owned", b"a\x00b", b"\xff", b"x" * 300, b"data.pkl", b"x/data.pkl", b"__proto__", b'"a"',
]
# fmt: on
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(rb"[\w./*-]+")


def mutated(rng: random.Random, files: Files, donor: Files) -> Files:
    """`files` with one to four faults; `donor` are other valid files of the kind, to splice with."""
    files = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(sorted(files))
        if len(files) > 1 and rng.random() < 0.03:
            other = rng.choice(sorted(files))
            files[name], files[other] = files[other], files[name]
        else:
            inside = PROTOBUF if name.endswith(".onnx") else None
            files[name] = _damaged(rng, files[name], donor.get(name, b""), inside)
    return files


def _damaged(rng: random.Random, data: bytes, donor: bytes, inside: Container | None = None) -> bytes:
    taken = parts_of(data, inside)
    if taken is None or rng.random() < 0.15:
        return rng.choice(_TEXT if _is_text(data) and rng.random() < 0.8 else _BYTES)(rng, data, donor)
    container, parts = taken
    others = parts_of(donor, inside)
    rng.choice(_PARTS)(rng, container, parts, others[1] if others else parts)
    return container.join(rng, parts)


def _is_text(data: bytes) -> bool:
    return data.isascii() and b"\0" not in data


# Bytes


def _flip(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _place(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, min(len(data), start + rng.choice((1, 4, 16, 256, len(data))))


def _truncate(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _cut(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    start, end = _place(rng, data)
    return data[:start] + data[end:]


def _repeat(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    start, end = _place(rng, data)
    times = min(rng.choice((1, 2, 64)), _LONGEST // (end - start + 1))
    return data[:end] + data[start:end] * times + data[end:]


def _splice(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return data[: rng.randint(0, len(data))] + donor[rng.randint(0, len(donor)) :]


def _edge(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    size, start = rng.choice((1, 2, 4, 8)), rng.randint(0, len(data))
    value = rng.choice(_EDGES) % 256**size
    return data[:start] + value.to_bytes(size, rng.choice(("little", "big"))) + data[start + size :]


def _real(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    """A float at the limits of its type, in a place for one."""
    form = rng.choice(("<f", "<d", "<e"))
    size = struct.calcsize(form)
    start = rng.randint(0, max(0, len(data) // size - 1)) * size + rng.choice((0, 0, len(data) % size))
    try:
        value = struct.pack(form, rng.choice(_REALS))
    except OverflowError:
        value = struct.pack(form, float("inf"))
    return data[:start] + value + data[start + size :]


def _kind(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    """Another type, in place of a named one."""
    held = [(kinds, kind) for kinds in _KINDS for kind in kinds if kind in data]
    if not held:
        return _real(rng, data, donor)
    kinds, kind = rng.choice(held)
    places = [match.start() for match in re.finditer(re.escape(kind), data)]
    start = rng.choice(places)
    return data[:start] + rng.choice(kinds) + data[start + len(kind) :]


def _noise(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    start, end = _place(rng, data)
    return data[:start] + rng.randbytes(min(end - start, 64)) + data[end:]


def _token(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + rng.choice(_TOKENS) + data[start:]


def _other(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return donor


# Text


def _at_a(pattern: re.Pattern[bytes], rng: random.Random, data: bytes, new: bytes) -> bytes:
    found = list(pattern.finditer(data))
    if not found:
        return new
    chosen = rng.choice(found)
    return data[: chosen.start()] + new + data[chosen.end() :]


def _number(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return _at_a(_NUMBER, rng, data, rng.choice(_NUMBERS))


def _word(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return _at_a(_WORD, rng, data, rng.choice(_WORD.findall(data + b" " + donor) or [b""]))


def _value(rng: random.Random, data: bytes, donor: bytes) -> bytes:
    return rng.choice(_VALUES)


_BYTES: list[Damage] = [_flip, _flip, _edge, _edge, _real, _kind, _truncate, _cut, _repeat, _splice, _noise]
_BYTES += [_token, _other]
_TEXT: list[Damage] = [_number, _number, _kind, _word, _value, _value, _token, _flip, _truncate, _repeat, _splice]


# Parts


def _into(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    place = rng.randrange(len(parts))
    name, content = parts[place]
    like = [other for key, other in others if key == name] or [rng.choice(others)[1]]
    parts[place] = name, _damaged(rng, content, rng.choice(like), container)


def _drop(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    if len(parts) > 1:
        del parts[rng.randrange(len(parts))]


def _double(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    parts += [rng.choice(parts)] * rng.choice((1, 1, 30))


def _swap(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    one, two = rng.randrange(len(parts)), rng.randrange(len(parts))
    (name, content), (other_name, other) = parts[one], parts[two]
    parts[one], parts[two] = (name, other), (other_name, content)


def _rename(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    place = rng.randrange(len(parts))
    name, content = parts[place]
    parts[place] = rng.choice((*_NAMES, rng.choice(parts)[0], _flip(rng, name, b""))), content


def _foreign(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    parts.insert(rng.randint(0, len(parts)), rng.choice(others))


def _exchange(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    """Another file's content at one place, under the name here."""
    place = rng.randrange(len(parts))
    parts[place] = parts[place][0], rng.choice(others)[1]


def _shuffle(rng: random.Random, container: Container, parts: list[Part], others: list[Part]) -> None:
    rng.shuffle(parts)


_PARTS = [*[_into] * 9, _drop, _double, _swap, _rename, _foreign, _exchange, _exchange, _shuffle]
