"""The inline PTX of the kernels computes what they compute in the interpreter, which has none.

Each program is executed here, instruction by instruction, as the PTX ISA defines them (sections of `cvt`, `cvt.pack`,
`prmt`).
"""

import ast
import re
from pathlib import Path

import torch

import swin_quant.backends.cuda.kernels as kernels

SOURCE = Path(kernels.__file__).parent / "jit" / "arithmetic.py"


def programs():
    """Inline PTX and its constraints by the name of the function that has it."""
    found = {}
    for function in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "inline_asm_elementwise":
                found[function.name] = [argument.value for argument in node.args[:2]]
    return found


def s32(x):
    return (x & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def saturated(x):
    return min(max(s32(x), -128), 127) & 0xFF


def float_of(bits):
    return torch.tensor(s32(bits), dtype=torch.int32).view(torch.float32).item()


def whole(bits):
    x = float_of(bits)
    if x != x:
        return 0
    return round(min(max(x, -(2.0**31)), 2.0**31 - 1)) & 0xFFFFFFFF


def permuted(a, b, selector):
    source = (a | b << 32).to_bytes(8, "little")
    assert all(selector >> 4 * i & 15 < 8 for i in range(4))
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def halves_minus(a, b):
    x, y = (torch.tensor([s32(value)], dtype=torch.int32).view(torch.float16) for value in (a, b))
    return (x - y).view(torch.int32).item() & 0xFFFFFFFF


INSTRUCTIONS = {
    "cvt.rni.s32.f32": whole,
    "cvt.pack.sat.s8.s32.b32": lambda a, b, c: (c & 0xFFFF) << 16 | saturated(a) << 8 | saturated(b),
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "prmt.b32": permuted,
    "sub.f16x2": halves_minus,
}


def executed(name, *inputs):
    """The output registers of an inline program, for its 32-bit input registers."""
    text, constraints = programs()[name]
    outputs = constraints.count("=")
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for statement in text.strip("{} \n").split(";"):
        operation, _, operands = statement.strip().partition(" ")
        if operation and operation != ".reg":
            to, *of = re.split(r",\s*", operands)
            values = [registers[one] if one in registers else int(one, 0) for one in of]
            registers[to] = INSTRUCTIONS[operation](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def test_rounding_to_int8():
    special = [float("inf"), float("-inf"), 1e30, -1e30, 2.0**31, float("nan"), 0.0, 127.5]
    x = torch.tensor([n / 4 for n in range(-600, 600)] + special)
    bits = (x.view(torch.int32).long() & 0xFFFFFFFF).view(-1, 4).tolist()
    packed = [s32(executed("_as_int8", *four)[0]) for four in bits]
    expected = x.nan_to_num(0.0, float("inf"), float("-inf")).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(torch.tensor(packed, dtype=torch.int32).view(torch.int8), expected)


def test_int8_to_half():
    x = torch.arange(-128, 128, dtype=torch.int8)
    halves = [s32(half) for four in x.view(torch.int32).tolist() for half in executed("as_half", four & 0xFFFFFFFF)]
    assert torch.equal(torch.tensor(halves, dtype=torch.int32).view(torch.float16), x.half())
