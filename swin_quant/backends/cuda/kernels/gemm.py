"""Matrix product of int8, float8 or half operands, with all that follows up to the next kernel as its epilogue."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.cuda.kernels.kernel import Kernel, PreparedLaunch, as_type
from swin_quant.backends.cuda.kernels.tiles import LINE, Tiles, gemm_tiles, least_step
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map
from swin_quant.backends.integer_arithmetic import product, rounded

SMALLEST_NORM = 1e-12  # divides a vector of zeros
FLAT = whole_map(1)  # rows stay in their order

Kind = Literal["quantize", "half", "gelu", "table", "unit", "residual"]


@dataclass(frozen=True)
class Epilogue:
    """The steps after the sums of a row. y = sums * scale + bias; then by `kind`:

    - "quantize": y * levels, or y where scale and bias hold the levels, in the type of `out`, int8 or float8 (E4M3),
      rounded and saturated
    - "half": y in the type of `out` (half or float32)
    - "gelu": GELU(y), exact, by erf, as "half"; with levels, which scale and bias hold, levels * GELU(y / levels),
      rounded and saturated
    - "table": FasterTransformer's GELU: table[n, sum in int8 + 128], without scale or bias (`gelu_table`)
    - "unit": V2's q and k, the first two thirds of the columns: y / |y| of each head (`head_dim` columns) * lengths,
      then as "quantize"; v as "quantize". Without levels as "half"
    - "residual": y + residual at the row's token, in the type of `out`

    FasterTransformer: `product_levels` multiplies the sums, which are then rounded to int8 if `product_rounds`.
    `half_steps`: sums * scale is rounded to half, then the residual and the bias are added in half. `unit_epsilon`: y *
    rsqrt(|y|^2 + unit_epsilon); None divides by |y|.
    """

    kind: Kind
    product_levels: float | None = None
    product_rounds: bool = True
    half_steps: bool = False
    head_dim: int = 32
    unit_epsilon: float | None = None

    def whole_heads(self, tiles: Tiles) -> Tiles:
        """Tiles widened to at least one head, if heads are normalised in them."""
        return replace(tiles, columns=max(tiles.columns, self.head_dim)) if self.kind == "unit" else tiles


@dataclass(frozen=True, eq=False)
class GemmKernel(Kernel):
    """out = epilogue(a w^T). Sums of int8 operands are exact, in int32; those of float8, half and float32 operands are
    float32."""

    a: Tensor  # [M, K]
    w: Tensor  # [N, K]
    scale: Tensor | None  # float32 [N], as bias
    bias: Tensor | None
    epilogue: Epilogue
    out: Tensor  # [M, N]; "residual": half [B, R, R, N], rows in map order
    windows: Windows = FLAT  # "residual": the order of a's rows
    residual: Tensor | None = None  # like out; may be the same tensor
    levels: Tensor | float | None = None  # float32 [N]; "gelu": one number
    lengths: Tensor | None = None  # "unit": float32 [N]; v's are unused
    before: Tensor | None = None  # "unit": float32 [2, N], levels and step of a previous rounding to int8
    table: Tensor | None = None  # "table": int8 [N, 256]

    def reference(self) -> None:
        e, out, residual, rows = self.epilogue, self.out, self.residual, None
        y = product(self.a, self.w)
        if e.product_levels is not None:
            y = y * e.product_levels
            y = rounded(y) if e.product_rounds else y
        if e.kind == "table":
            assert self.table is not None
            out.copy_(self.table.gather(1, (y.T + 128).long()).T)
            return
        y = y if self.scale is None else y * self.scale
        if e.kind == "residual":
            assert residual is not None
            rows = self.windows.find_tokens(y.shape[0], y.device)
            residual = residual.view(-1, y.shape[1])[rows]
        if e.half_steps:
            y = y.to(out.dtype)
            y = y if residual is None else residual + y
            y = y if self.bias is None else y + self.bias.to(out.dtype)
        else:
            y = y if self.bias is None else y + self.bias
            y = y if residual is None else y + residual.float()
        if e.kind == "gelu":
            assert not isinstance(self.levels, Tensor), "GELU has one range"
            if self.levels is None:
                y = F.gelu(y)
            else:  # 0 for levels of 0, of a range so small that every level is 0
                y = F.gelu(y / self.levels) * self.levels if self.levels else torch.zeros_like(y)
        elif e.kind == "unit":
            assert self.lengths is not None
            y = _unit(y, self.lengths, self.before, e)
        y = as_type(y * self.levels if isinstance(self.levels, Tensor) else y, out.dtype)
        if rows is None:
            out.copy_(y)
        else:
            out.view(-1, y.shape[1])[rows] = y

    def prepare(self, tiles: Tiles | None = None) -> PreparedLaunch:
        e, (m, k), n, size = self.epilogue, self.a.shape, self.w.shape[0], self.a.element_size()
        # Longer steps of float8 along K spill on 10.0 if rows are scattered to the map.
        is_scattered = e.kind == "residual" and self.windows.window < self.windows.side
        t = tiles or gemm_tiles(m, n, k, size, 64 if is_scattered and self.a.dtype == torch.float8_e4m3fn else LINE)
        t = e.whole_heads(t.holding(columns=1, inner=least_step(size)))
        constants = {"N": n, "K": k, "KIND": e.kind, "PRODUCT_ROUNDS": e.product_rounds, "HALF_STEPS": e.half_steps}
        constants |= {"HEAD": e.head_dim, **self.windows.constants(), "BM": t.rows, "BN": t.columns, "BK": t.inner}
        arguments = self.values(rows_in_all=m, product_levels=e.product_levels, unit_epsilon=e.unit_epsilon)
        grid = (-(-m // t.rows) * -(-n // t.columns),)
        # FasterTransformer rounds products before it adds: a fused multiply-add would not.
        options = {"enable_fp_fusion": False} if e.product_levels is not None else {}
        return PreparedLaunch("gemm.gemm", grid, arguments, constants, t, options)


def _unit(y: Tensor, lengths: Tensor, before: Tensor | None, e: Epilogue) -> Tensor:
    """float32 [M, 3C]: q and k scaled to `lengths`, v unchanged."""
    columns = y.shape[1] // 3 * 2
    if before is not None:
        levels, step = before[:, :columns]
        y = torch.cat([rounded(y[:, :columns] * levels) * step, y[:, columns:]], dim=1)
    heads = y[:, :columns].unflatten(1, (-1, e.head_dim))
    factor = lengths[:columns].view(-1, e.head_dim)
    if e.unit_epsilon is None:
        factor = factor / heads.square().sum(-1, keepdim=True).sqrt().clamp_min(SMALLEST_NORM)
    else:
        factor = torch.rsqrt(heads.square().sum(-1, keepdim=True) + e.unit_epsilon) * factor
    return torch.cat([(heads * factor).flatten(1), y[:, columns:]], dim=1)
