"""Functions that kernels share: rounding, norms, and addresses of tokens; the references are `arithmetic` and
`windows`."""

import os

import triton
import triton.language as tl

# Added to a float32 of at most 2^22, it rounds the fraction half to even and leaves the whole number in the lowest
# bits. This needs no conversion, and no instruction that the interpreter lacks.
SHIFTER = tl.constexpr(12582912.0)
LARGEST_E4M3 = tl.constexpr(448.0)
NAN_E4M3 = tl.constexpr(0x7FF00000)  # the interpreter cuts these bits to the NaN of E4M3
SMALLEST_NORMAL_E4M3 = tl.constexpr(2.0**-6)
# Triton's interpreter rounds ties of float8 away from zero, loses the carry into the exponent, and truncates values
# below the smallest normal one; it truncates bfloat16. Hardware does neither, so only the interpreter needs values that
# are already on the grid.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def rounded(x):
    """Whole numbers from -128 to 127, still float32."""
    return (tl.minimum(tl.maximum(x, -128.0), 127.0) + SHIFTER) - SHIFTER


@triton.jit
def as_type(x, TYPE: tl.constexpr):
    """float32 x as it is stored: rounded and saturated to int8, a NaN as 0; saturated to float8; or converted to a
    float type."""
    if TYPE == tl.int8:
        return _as_int8(x)
    elif TYPE == tl.float8e4nv:
        return on_e4m3(x).to(TYPE) if INTERPRETED else x.to(TYPE)  # hardware saturates, and keeps a NaN
    else:
        if INTERPRETED and TYPE == tl.bfloat16:
            x = on_bfloat16(x)
        return x.to(TYPE)


@triton.jit
def _as_int8(x):
    if INTERPRETED:
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)
        return (x + SHIFTER).to(tl.int32, bitcast=True).to(tl.int8)
    else:  # two instructions for two values, beside one each that rounds half to even
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 r<4>, high;
            cvt.rni.s32.f32 r0, $1; cvt.rni.s32.f32 r1, $2; cvt.rni.s32.f32 r2, $3; cvt.rni.s32.f32 r3, $4;
            cvt.pack.sat.s8.s32.b32 high, r3, r2, 0;
            cvt.pack.sat.s8.s32.b32 $0, r1, r0, high;
            }""",
            "=r,r,r,r,r",
            [x],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def as_half(x, TYPE: tl.constexpr):
    """int8, float8 or half x as half."""
    if x.dtype == tl.int8 and TYPE == tl.float16 and not INTERPRETED:
        # The bytes of x + 128 are the last ones of the halves 1024 + x + 128: no conversion, one value at a time.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, low, high, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 bytes, $2, 0x80808080;
            prmt.b32 low, bytes, offset, 0x5150;
            prmt.b32 high, bytes, offset, 0x5352;
            sub.f16x2 $0, low, offset;
            sub.f16x2 $1, high, offset;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(TYPE)


@triton.jit
def exp2(x):
    """2^x within 2 units in the last place; 0 below the smallest normal float32."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x within a unit in the last place, for normal float32 x; a division scales its operands first."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def on_e4m3(x):
    """float32 x, saturated and rounded half to even to a value of E4M3: whole eighths of the power of two below x."""
    is_nan = x != x
    x = tl.minimum(tl.maximum(x, -LARGEST_E4M3), LARGEST_E4M3)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shifter = tl.maximum(power, SMALLEST_NORMAL_E4M3) * 1572864.0  # 1.5 * 2^20: its last bit is an eighth
    bits = ((x + shifter) - shifter).to(tl.int32, bitcast=True)
    return tl.where(is_nan, NAN_E4M3, bits).to(tl.float32, bitcast=True)


@triton.jit
def on_bfloat16(x):
    """float32 x, rounded half to even to a value of bfloat16, its upper 16 bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def normed(x, c, weight, bias, eps, C: tl.constexpr):
    """LayerNorm of the rows of x [ROWS, BLOCK], float32; the columns from C on are zero."""
    valid = c < C
    x = tl.where(valid[None, :], x - (tl.sum(x, 1) / C)[:, None], 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
    x = x * tl.load(weight + c, mask=valid, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        x = x + tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def find_place(rows, SIDE: tl.constexpr, WINDOW: tl.constexpr):
    """Line and column on the shifted map, for rows in window order."""
    ACROSS: tl.constexpr = SIDE // WINDOW
    window = rows // (WINDOW * WINDOW) % (ACROSS * ACROSS)
    token = rows % (WINDOW * WINDOW)
    return window // ACROSS * WINDOW + token // WINDOW, window % ACROSS * WINDOW + token % WINDOW


@triton.jit
def find_token(rows, SIDE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """The row in map order, for rows in window order."""
    if SIDE == WINDOW and SHIFT == 0:
        return rows
    else:
        y, x = find_place(rows, SIDE, WINDOW)
        y, x = (y + SHIFT) % SIDE, (x + SHIFT) % SIDE
        return (rows // (SIDE * SIDE) * SIDE + y) * SIDE + x
