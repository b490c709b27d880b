"""Rows of launches that one kernel can replace, and the choice among them for a GPU.

The choice is a table in the GPU's file in `configs/machines`: `python tools/cuda/fusions.py` estimates it, `python
tools/cuda/tune.py` measures parts of it.
"""

import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, NamedTuple

import torch

from swin_quant.backends.cuda.gpu import Machine
from swin_quant.backends.cuda.kernels.windows import whole_map
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import Launch, Program, TensorRef, make_kernel, make_program
from swin_quant.backends.cuda.spec import NetworkSpec
from swin_quant.base.errors import SwinQuantError

OPERANDS = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
# Operands (int8, float8, half) -> title of a fusion -> channels -> tokens from which it is taken, left, taken, ...
FusionTable = Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]
Group = Sequence[Launch]  # launches, in order, that one kernel can replace
STEP = 32  # channels: kernels hold rows in parts, whose widths are powers of two from this one up
_NORM1 = r"norm_quantize:.*(norm1|attn\.qkv\._input_quantizer)"
_NORM2 = r"(norm_quantize:.*norm2|norm_residual:.*norm1)"
_POST2 = r"norm_residual:.*norm2"
_MERGING = r".*downsample\.reduction"
_QKV, _PROJ, _FC1, _FC2 = (rf"gemm\S*:.*{layer}" for layer in (r"attn\.qkv", r"attn\.proj", r"mlp\.fc1", r"mlp\.fc2"))


@dataclass(frozen=True)
class Fusion:
    """Consecutive launches that become one; each matches a pattern of its `label`.

    `op`: the kernel that replaces them. `widest`: the most channels that fit on the chip.
    """

    title: str
    patterns: tuple[str, ...]
    op: str
    widest: int

    def fits(self, launches: Sequence[Launch]) -> bool:
        """Whether the first of these launches match the patterns, and the kernel takes their products: one operand
        type, whole steps of channels, no more than fit, and no FasterTransformer roundings."""
        row = launches[: len(self.patterns)]
        if len(row) < len(self.patterns) or not all(map(re.fullmatch, self.patterns, map(label, row))):
            return False
        products = [one.arguments for one in row if one.op == "gemm"]
        weights: list[TensorRef] = [one["w"] for one in products]
        sides = [side for weight in weights for side in weight.shape]
        return (
            len({weight.dtype for weight in weights}) == 1
            and all(side % STEP == 0 for side in sides)
            and all(one["epilogue"].product_levels is None for one in products)
            and min(sides) <= self.widest
        )

    def merged(self, group: Group) -> Launch:
        """The launch that replaces the group."""
        first, *rest = (one.name for one in group)
        shared = len(commonprefix([first, *rest]).rpartition(".")[0]) + 1
        return Launch(
            self.op,
            " + ".join([first, *(name[shared:] for name in rest)]),
            _ARGUMENTS[self.op](*(one.arguments for one in group)),
            sum(one.operations for one in group),
            next(one.products for one in group if one.products),
        )


def _norm(norm: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_weight": norm["weight"], "norm_bias": norm["bias"], "eps": norm["eps"]}


def _norm_gemm(norm: Mapping[str, Any], linear: Mapping[str, Any]) -> dict[str, Any]:
    left = ("a", "before", "windows", "residual")
    return {
        "x": norm["x"],
        **_norm(norm),
        "input_levels": norm["levels"],
        "windows": norm.get("windows") or whole_map(norm["x"].shape[1] // 2),  # patch merging has none
        **{word: value for word, value in linear.items() if word not in left},
    }


def _gemm_norm(linear: Mapping[str, Any], norm: Mapping[str, Any]) -> dict[str, Any]:
    post = "y" in norm  # V2 normalises the branch
    stream = norm if post else linear
    return {
        **{word: linear[word] for word in ("a", "w", "scale", "bias")},
        **{word: stream[word] for word in ("windows", "residual", "out")},
        **_norm(norm),
        "levels": norm.get("levels"),
        "out_quantized": norm.get("out_quantized") if post else norm["out"],
        "post": post,
    }


def _attention_norm(attention: Mapping[str, Any], linear: Mapping[str, Any], norm: Mapping[str, Any]) -> dict[str, Any]:
    behind = {word: value for word, value in _gemm_norm(linear, norm).items() if word != "a"}
    return {word: value for word, value in attention.items() if word != "out"} | behind


def _mlp(fc1: Mapping[str, Any], fc2: Mapping[str, Any], norm: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "a": fc1["a"],
        "w1": fc1["w"],
        "scale1": fc1["scale"],
        "bias1": fc1["bias"],
        "hidden_levels": fc1["levels"],
        **{word: fc2[word] for word in ("w", "scale", "bias")},
        **{word: (norm or fc2)[word] for word in ("residual", "out")},
        **(_norm(norm) if norm else {}),
    }


_ARGUMENTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "norm_gemm": _norm_gemm,
    "gemm_norm": _gemm_norm,
    "attention_norm": _attention_norm,
    "mlp": _mlp,
}

FUSIONS = (
    Fusion("norm1 into qkv", (_NORM1, _QKV), "norm_gemm", 1536),
    Fusion("attention, proj and norm2", (r"attention:.*", _PROJ, _NORM2), "attention_norm", 768),
    Fusion("norm2 into proj", (_PROJ, _NORM2), "gemm_norm", 768),
    Fusion("one MLP with V2's norm", (_FC1, _FC2, _POST2), "mlp", 384),
    Fusion("one MLP", (_FC1, r"gemm\.residual:.*mlp\.fc2"), "mlp", 384),
    Fusion("V2's norm into fc2", (_FC2, _POST2), "gemm_norm", 768),
    # 512 is half the merged channels, all of which are on the chip
    Fusion("merging into its linear", (r"merge_quantize:.*", rf"gemm\.half:{_MERGING}"), "norm_gemm", 512),
    Fusion("V2's norm into merging", (rf"gemm:{_MERGING}", r"norm_residual:.*downsample\.norm"), "gemm_norm", 768),
    Fusion("norm2 into fc1", (r"norm_quantize:.*norm2", _FC1), "norm_gemm", 1536),
)
"""Every fusion that has a kernel; where several fit, the first that the GPU's table lists is taken."""
Row = tuple[Fusion | None, Group]  # a fusion and the launches that it merges, or None and a single launch


def label(launch: Launch) -> str:
    """`op:name` of a launch; for a product `gemm.kind:name`, by its epilogue."""
    kind = f".{launch.arguments['epilogue'].kind}" if launch.op == "gemm" else ""
    return f"{launch.op}{kind}:{launch.name}"


def rows(launches: Sequence[Launch], takes: Callable[[Fusion, Group], bool] = Fusion.fits) -> list[Row]:
    """The launches in groups: each is the first fusion that `takes` the launches from there, or a single launch."""
    found: list[Row] = []
    at = 0
    while at < len(launches):
        one = next((fusion for fusion in FUSIONS if takes(fusion, launches[at:])), None)
        end = at + (len(one.patterns) if one else 1)
        found.append((one, launches[at:end]))
        at = end
    return found


def fused(program: Program, found: Sequence[Row]) -> Program:
    """The program with these groups merged, one launch for each."""
    launches = tuple(fusion.merged(group) if fusion else group[0] for fusion, group in found)
    return make_program(program.batch, launches, program.images, program.logits)


class Size(NamedTuple):
    """What the choice of a fusion depends on: the type of its products' operands (int8, float8 or half), their
    narrowest side in channels, and the number of tokens in a batch."""

    operands: str
    channels: int
    tokens: int


def get_size(group: Group) -> Size:
    """The size of launches that can be fused."""
    products = [one.arguments for one in group if one.op == "gemm"]
    weights, a = [one["w"] for one in products], products[0]["a"]
    channels = min(side for weight in weights for side in weight.shape)
    return Size(OPERANDS.get(weights[0].dtype, "half"), channels, a.shape[0])


def fused_program(spec: NetworkSpec, batch: int, machine: Machine | None) -> Program:
    """The program of `spec` as a GPU runs it; without a machine, nothing is fused."""
    program = build_program(spec, batch)
    return fused(program, listed(program.launches, machine.gpu.fusions)) if machine else program


def listed(launches: Sequence[Launch], table: FusionTable) -> list[Row]:
    """The grouping of launches by a GPU's table: at each launch the first fusion that fits and is in the table."""

    def is_listed(fusion: Fusion, left: Group) -> bool:
        if not fusion.fits(left):
            return False
        group = left[: len(fusion.patterns)]
        size = get_size(group)
        widths = table.get(size.operands, {}).get(fusion.title)
        if not widths:
            return False
        nearest = min(widths, key=lambda word: max(int(word) / size.channels, size.channels / int(word)))
        if bisect(widths[nearest], size.tokens) % 2 == 0:
            return False
        try:
            make_kernel(fusion.merged(group)).prepare()
        except SwinQuantError:  # the network is narrower than the tiles
            return False
        return True

    return rows(launches, is_listed)
