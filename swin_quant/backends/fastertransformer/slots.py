"""The weight list of an op, in order: names, shapes, types and layouts from the geometry alone.

See docs/reference, sections 3.2 (INT8), 3.7 (float) and 4.2 (the TensorRT plugin's fields). The op checks only the
number of tensors; writing and reading both check the rest by this list.
"""

import math
from dataclasses import dataclass, replace

from swin_quant.backends.fastertransformer.layouts import DRIFT, LARGEST, is_misread, padded_side, weight_layout
from swin_quant.models.geometry import Geometry

FUSED_HEAD_DIM, FUSED_SMS, FUSED_TOKENS = 32, (75, 80, 86), 384
AMAX_LIST = 96
ROWS, WIDEST = 4, 256  # V1's norm after attention computes rows in fours, of up to so many channels

# Maps the checkpoint's name of a tensor, or the name of its source, to the plugin's field.
BLOCK = {
    "attn.qkv.weight": "attention_qkv_kernel",
    "attn.qkv.bias": "attention_qkv_bias",
    "attn.proj.weight": "attention_proj_kernel",
    "attn.proj.bias": "attention_proj_bias",
    "mlp.fc1.weight": "mlp_linear_kernel",
    "mlp.fc1.bias": "mlp_linear_bias",
    "mlp.fc2.weight": "mlp_linear2_kernel",
    "mlp.fc2.bias": "mlp_linear2_bias",
    "norm1.weight": "block_norm_gamma",
    "norm1.bias": "block_norm_beta",
    "norm2.weight": "block_norm2_gamma",
    "norm2.bias": "block_norm2_beta",
    "amaxList": "block_d_amaxlist",
    "h_amaxList": "block_h_amaxlist",
    "attn.relative_position_bias": "attention_relative_pos_bias",
    "attn.trt_relative_position_bias": "trt_relative_position_bias",
    "attn.logit_scale": "attention_logit_scale",
}
STAGE = {
    "downsample.norm.weight": "patchMerge_norm_gamma",
    "downsample.norm.bias": "patchMerge_norm_beta",
    "downsample.reduction.weight": "patchMerge_linear_kernel",
    "attn_mask": "attn_mask",
    "trt_attn_mask": "trt_attn_mask",
}
MODEL = {
    "patch_embed.proj.weight": "patchEmbed_proj_kernel",
    "patch_embed.proj.bias": "patchEmbed_proj_bias",
    "patch_embed.norm.weight": "patchEmbed_norm_gamma",
    "patch_embed.norm.bias": "patchEmbed_norm_beta",
    "norm.weight": "norm_gamma",
    "norm.bias": "norm_beta",
}
KERNELS = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight", "downsample.reduction.weight")
MERGING = ("downsample.norm.weight", "downsample.norm.bias", "downsample.reduction.weight")
PACKED = ("attn.trt_relative_position_bias", "trt_attn_mask")
HEAD = ("head.weight", "head.bias")  # outside the op, in float32
FIELDS = BLOCK | STAGE | MODEL
EMPTY = (0,)


@dataclass(frozen=True)
class Case:
    """The requested export: version 1 or 2; `kind` int8, float16 or float32; `sm`: the target's compute capability.

    `fix_gelu_bias` stores biases that the GELU kernel misreads where it reads them.
    """

    g: Geometry
    version: int
    kind: str
    sm: int
    fix_gelu_bias: bool = False
    int8_mode: int | None = None
    max_batch: int = 128

    @property
    def int8(self) -> bool:
        return self.kind == "int8"

    @property
    def fused(self) -> bool:
        """Whether the INT8 op runs the fused attention: one decision for all stages, by the configured window."""
        g = self.g
        return self.sm in FUSED_SMS and head_dim(g) == FUSED_HEAD_DIM and g.window**2 <= FUSED_TOKENS

    @property
    def lost_rows(self) -> list[int]:
        """Stages in which V1 loses rows if the batch is no multiple of four."""
        stages = range(len(self.g.depths)) if self.version == 1 else ()
        rows = {stage: self.g.resolution(stage) ** 2 for stage in stages}
        return [stage for stage, count in rows.items() if computed_rows(count, self.g.embed_dim * 2**stage) < count]

    @property
    def widest(self) -> int:
        """The most channels between fc1 and fc2."""
        return max(hidden_channels(self.g, stage) for stage in range(len(self.g.depths)))


@dataclass(frozen=True)
class Slot:
    """One tensor of the list. `shape` is the op's, `source` the shape before the layout.

    `container` is the type whose storage holds the bytes of `dtype`: an int8 kernel fills the first half of a float16
    tensor with as many elements. `place`: the stage and block of a tensor, as far as it is in them.
    """

    index: int
    part: str
    place: tuple[int, ...]
    dtype: str
    container: str | None
    shape: tuple[int, ...]
    source: tuple[int, ...]
    layout: str
    device: str

    @property
    def name(self) -> str:
        """The name in a checkpoint, such as layers.0.blocks.1.attn.qkv.weight."""
        outer = zip(("layers", "blocks"), self.place, strict=False)
        return "".join(f"{kind}.{number}." for kind, number in outer) + self.part

    @property
    def field(self) -> str:
        """The TensorRT plugin's field, such as attention_qkv_kernel_0_1."""
        return "_".join([FIELDS[self.part], *map(str, self.place)])

    @property
    def key(self) -> str:
        """The name in the safetensors file, which sorts in the order of the list."""
        return f"{self.index:04d}.{self.name}"


def head_dim(g: Geometry) -> int:
    """Channels of an attention head, which the op computes from stage 0."""
    return g.embed_dim // g.heads[0]


def hidden_channels(g: Geometry, stage: int) -> int:
    """Channels between fc1 and fc2."""
    return int(g.embed_dim * 2**stage * g.mlp_ratio)


def computed_rows(rows: int, channels: int) -> int:
    """The number of a batch's rows that V1's norm after attention computes, counted from the first."""
    return rows // ROWS * ROWS if channels <= WIDEST else rows


def slots(case: Case) -> list[Slot]:
    """The list of an export."""
    g, found = case.g, list[Slot]()

    def add(part: str, place: tuple[int, ...], source: tuple[int, ...], side: int = 0) -> None:
        found.append(_make_slot(len(found), part, place, source, side, case))

    for stage, depth in enumerate(g.depths):
        c, heads, tokens = g.embed_dim * 2**stage, g.heads[stage], g.window_in_use(stage) ** 2
        # The padded side of packed masks and biases; 0 if there are none.
        side = padded_side(tokens, case.int8) if tokens <= LARGEST and head_dim(g) == FUSED_HEAD_DIM else 0
        hidden, bias = hidden_channels(g, stage), (heads, tokens, tokens)
        linears = [(3 * c, c), (3 * c,), (c, c), (c,), (hidden, c), (hidden,), (c, hidden), (c,)]
        rest = [*4 * [(c,)], (AMAX_LIST,), (AMAX_LIST,), bias, bias if side else EMPTY, (heads, 1, 1)]
        for block in range(depth):
            for part, shape in zip(BLOCK, linears + rest, strict=True):
                if (case.int8 or "amaxList" not in part) and (case.version == 2 or part != "attn.logit_scale"):
                    add(part, (stage, block), shape, side)
        norm, count = 4 * c if case.version == 1 else 2 * c, (g.resolution(stage) // g.window_in_use(stage)) ** 2
        merging = [(norm,), (norm,), (2 * c, 4 * c)] if stage < len(g.depths) - 1 else 3 * [EMPTY]
        mask = (count, tokens, tokens) if count > 1 else EMPTY
        for part, shape in zip(STAGE, [*merging, mask, mask if side else EMPTY], strict=True):
            add(part, (stage,), shape, side)
    c, last = g.embed_dim, g.embed_dim * 2 ** (len(g.depths) - 1)
    shapes = [(c, g.in_chans, g.patch_size, g.patch_size), (c,), (c,), (c,), (last,), (last,)]
    for part, shape in zip(MODEL, shapes, strict=True):
        add(part, (), shape)
    return found


def _make_slot(index: int, part: str, place: tuple[int, ...], source: tuple[int, ...], side: int, case: Case) -> Slot:
    slot = Slot(index, part, place, case.kind, None, source, source, "row-major", "cuda")
    if case.int8:
        on_host = part == "h_amaxList" or source == EMPTY
        wide = part in ("amaxList", "h_amaxList") or (source == EMPTY and part in MERGING)
        dtype = "float32" if wide else "float16"  # the last stage's missing tensors are an empty torch.Tensor()
        slot = replace(slot, dtype=dtype, device="cpu" if on_host else "cuda")
    if source == EMPTY:
        return replace(slot, layout="empty")
    if part in PACKED:
        return replace(slot, layout="trt-packed", shape=(source[0], side, side))
    if case.int8 and part in KERNELS:
        shape = source if index == 0 else (math.prod(source),)  # the op takes the head width from the first
        return replace(slot, dtype="int8", container="float16", layout=weight_layout(case.sm), shape=shape)
    if case.fix_gelu_bias and part == "mlp.fc1.bias" and is_misread(*source):
        return replace(slot, layout="gelu-shifted", shape=(source[0] + DRIFT,))
    if not case.int8 and part in ("attn.qkv.weight", "attn.qkv.bias"):
        return replace(slot, layout="head-interleaved", shape=source[::-1])
    return slot
