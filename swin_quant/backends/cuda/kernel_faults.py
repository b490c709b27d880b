"""Faults of a compiled kernel: it spills, does not fit, multiplies twice, or multiplies without tensor cores."""

from collections.abc import Iterator

from swin_quant.backends.cuda.crosscompile import CompiledKernel, KernelCall

_WARP_GROUP = 64, 4  # rows of a tile, warps
_HALVES = "*fp16", "*bf16"
_AGAIN = 1.25  # times its products: 8 warps of the widest projections behind attention share 32 channels of a head
_GROUPS_ALONE = 90, 100  # capabilities whose float8 products are of whole warp groups


def kernel_faults(call: KernelCall, made: CompiledKernel) -> Iterator[str]:
    """A line for each fault."""
    types, constants = dict(call.types), dict(call.constants)
    operand = types.get("w", types.get("qkv", types.get("weight")))  # norms' weights are float32
    rows = min(constants.get(side, _WARP_GROUP[0]) for side in ("BM", "BQ"))
    by_groups = rows >= _WARP_GROUP[0] and made.warps >= _WARP_GROUP[1]
    if made.spilled:
        yield f"spills {made.spilled} bytes"
    if not made.programs:
        yield f"{made.shared} bytes of shared memory, more than a program may have"
    if made.repeated > _AGAIN:
        yield f"warps compute the same: {made.repeated:.2f} times its products"
    if operand == "*i8" and not made.int8:
        yield "no int8 tensor-core instructions"
    if operand == "*fp8e4nv" and not made.float8 and (by_groups or made.capability not in _GROUPS_ALONE):
        yield "no float8 tensor-core instructions"
    if operand in _HALVES and not made.mma:
        yield "no tensor-core instructions"
    if made.capability == 90 and by_groups and "IMMA" in made.mma:
        yield "not by warp groups"
