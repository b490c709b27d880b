"""Limits of FasterTransformer's kernels, checked before anything is written (docs/reference, section 3.9).

Most would not fail on the GPU: the op checks only the number of tensors, and computes garbage.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from swin_quant.backends.fastertransformer import KINDS
from swin_quant.backends.fastertransformer.layouts import LARGEST, MOST_HIDDEN, is_misread
from swin_quant.backends.fastertransformer.slots import FUSED_SMS, ROWS, Case, head_dim, hidden_channels
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.models.geometry import Geometry
from swin_quant.models.layers import Swin
from swin_quant.quant import INT8_MODES
from swin_quant.quant.policy import Policy, described, load_policy, settings_for

DEFAULT_SCALE = 1.0  # qk_scale that stands for head_dim ** -0.5
LARGEST_HALF = 65504.0


def is_default_scale(g: Geometry) -> bool:
    """Whether attention has the kernels' default scale."""
    return g.qk_scale is None or math.isclose(g.qk_scale, head_dim(g) ** -0.5, rel_tol=1e-6)


Limit = tuple[Callable[[Case], object], str]
INSTEAD = "`export --precision float --float-type {}` exports"
ALWAYS: tuple[Limit, ...] = (
    (lambda c: c.max_batch < 1, "‹batch› {batch}: must be at least 1"),
    (lambda c: not 52 <= c.sm <= 90, "‹sm› {sm}: FasterTransformer builds for compute capability 52 to 90"),
    (lambda c: c.g.ape, "APE: the kernels add no absolute position embedding"),
    (lambda c: not c.g.qkv_bias, "QKV_BIAS False: the kernels always add a bias to q, k and v"),
    (lambda c: not c.g.patch_norm, "PATCH_NORM False: the op's list has a norm after the patch embedding"),
    (lambda c: c.g.window > 32, "WINDOW_SIZE {window}: position biases are for windows of up to 32"),
    (
        lambda c: any(c.g.embed_dim * 2**i // heads != head_dim(c.g) for i, heads in enumerate(c.g.heads)),
        "NUM_HEADS {heads}: the op takes the head's width of stage 0 ({d}) for that of every stage",
    ),
    (
        lambda c: c.g.qk_scale == DEFAULT_SCALE and not is_default_scale(c.g),
        "QK_SCALE 1.0: to the op that number means the default, head width ** -0.5",
    ),
)
FLOAT: tuple[Limit, ...] = (
    (lambda c: c.fix_gelu_bias, "‹fix_gelu_bias›: only the INT8 kernel of GELU misreads a bias: leave it out"),
)
INT8: tuple[Limit, ...] = (
    (
        lambda c: c.sm < 75,
        f"‹sm› {{sm}}: the INT8 GEMMs need compute capability 75 or above; {INSTEAD.format('float16')}",
    ),
    (lambda c: head_dim(c.g) % 32 > 0, "head width {d}: the INT8 kernels need 32 (fused attention) or a multiple"),
    (lambda c: c.g.embed_dim % 32 > 0, "EMBED_DIM {embed}: the INT8 layouts need a multiple of 32"),
    (
        lambda c: hidden_channels(c.g, 0) % 32 > 0,
        "MLP_RATIO {ratio}: the INT8 layouts need hidden channels in multiples of 32",
    ),
    (
        lambda c: c.lost_rows and c.max_batch < ROWS,
        "‹batch› {batch}: the norm after attention computes rows in fours in layers.{lost[0]} (at most 256 channels, a "
        "map of odd side) and leaves out the last ones of fewer than 4 pictures: give 4 or more",
    ),
    (
        lambda c: c.widest > MOST_HIDDEN,
        "{widest} hidden channels: the INT8 kernel of GELU leaves out four of more than 8192, and no weights undo that",
    ),
    (
        lambda c: c.fix_gelu_bias and not is_misread(c.widest),
        "‹fix_gelu_bias›: it has {widest} hidden channels at most, and only more than 4096 are misread: leave it out",
    ),
    (
        lambda c: c.version == 2 and c.int8_mode == 2,
        "Swin V2 under ft-mode2: the kernels ignore mode 2 in V2 and quantize what the policy leaves in float; use "
        "ft-mode1",
    ),
    (
        lambda c: c.fused and c.g.window**2 > LARGEST,
        "WINDOW_SIZE {window} on sm {sm}: the fused attention would run without its position bias, which is packed for "
        "at most 256 tokens; only GPUs that run it unfused (‹sm› 89, 90) can run this model",
    ),
    (
        lambda c: c.fused and not is_default_scale(c.g),
        "QK_SCALE {scale} on sm {sm}: the fused INT8 attention ignores it; only GPUs that run it unfused (‹sm› 89, 90) "
        "can run this model",
    ),
    (
        lambda c: c.version == 2 and c.sm < 80 and not c.fused,
        "Swin V2 with WINDOW_SIZE {window} and head width {d} on sm {sm}: the unfused attention normalizes k in the "
        "layout of sm 80; use ‹sm› 80 or a window of up to 16",
    ),
)
WARNINGS: tuple[Limit, ...] = (
    (
        lambda c: c.sm not in FUSED_SMS,
        "sm {sm} runs the unfused attention, and nobody has published INT8 Swin on it: measure",
    ),
    (
        lambda c: c.lost_rows,
        "the norm after attention computes rows in fours in layers.{lost[0]} (at most 256 channels, a map of odd side) "
        "and leaves out the last ones of a batch that 4 does not divide: run batches of 4, 8, 12, ...",
    ),
    (
        lambda c: is_misread(c.widest) and not c.fix_gelu_bias,
        "{widest} hidden channels: the kernel of GELU reads fc1's bias three places off from channel 4096 on; "
        "‹fix_gelu_bias› stores the bias where it looks, ‹check› measures what it costs",
    ),
    (
        lambda c: c.fix_gelu_bias,
        "fc1's bias is stored longer by three for the kernel of GELU: the op reads it rightly, but the TensorRT plugin "
        "cuts those three off, and a kernel that was mended needs an export without ‹fix_gelu_bias›",
    ),
)  # limits of INT8 exports that do not prevent a run


def check_limits(case: Case) -> None:
    """UsageError with the reason if the kernels cannot run a model of this geometry unchanged."""
    if case.kind not in KINDS:
        raise UsageError(f"kind {case.kind}: must be {', '.join(KINDS)}")
    for reason in _holding(ALWAYS + (INT8 if case.int8 else FLOAT), case):
        raise UsageError(f"FasterTransformer cannot run this model: {reason}")


def list_warnings(case: Case) -> list[str]:
    """Warnings about unexpected behaviour of the kernels for this model."""
    return list(_holding(WARNINGS, case)) if case.int8 else []


def _holding(limits: Iterable[Limit], case: Case) -> Iterator[str]:
    g = case.g
    for holds, text in limits:
        if holds(case):
            yield text.format(
                sm=case.sm, window=g.window, heads=list(g.heads), d=head_dim(g), embed=g.embed_dim,
                ratio=g.mlp_ratio, scale=g.qk_scale, widest=case.widest, batch=case.max_batch, lost=case.lost_rows,
            )  # fmt: skip


def find_int8_mode(model: Swin, policy: Policy | None) -> int:
    """The mode, 1 or 2, that quantizes exactly as `policy` does. UsageError with the nodes if neither does."""
    if policy is None:
        raise UsageError("an INT8 export needs a policy: `calibrate --policy ft-mode1` or ft-mode2, or give ‹policy›")
    wanted = settings_for(model, policy)
    for mode, name in INT8_MODES.items():
        offered = settings_for(model, load_policy(name))
        other = [
            node for node in wanted if (wanted[node].enabled or offered[node].enabled) and wanted[node] != offered[node]
        ]
        if not other:
            return mode
    raise UsageError(
        f"policy {described(policy)}: FasterTransformer's kernels run ft-mode1 and ft-mode2 only, with int8 per "
        f"tensor; it differs in {listed(other, 2)}"
    )


def check_half_range(ranges: Mapping[str, float], beyond_half: list[str], kind: str) -> None:
    """SwinQuantError if values that the kernels keep in float16 are known to overflow."""
    streams = ("layernorm_input1", "layernorm_input2", "add1_residual", "add1_local", "add2_residual", "add2_local")
    nodes = [n for n in beyond_half if kind == "float16" or n.rpartition(".")[2].startswith(streams)]
    if nodes and kind != "float32":
        raise SwinQuantError(
            f"calibration saw values beyond float16 (65504) in {listed(nodes, 2)}: FasterTransformer keeps the "
            f"residual stream in float16 and would overflow; {INSTEAD.format('float32')}, or use another backend"
        )
    if kind == "int8":
        tiny = [n for n, a in ranges.items() if n.endswith("mlp.fc2._input_quantizer") and 0 < a < 127 / LARGEST_HALF]
        if tiny:
            raise SwinQuantError(
                f"range too small for float16 in {listed(tiny, 2)}: the kernel after GELU multiplies by 127 / amax in "
                "float16, which overflows below 0.00194; `calibrate --calibrator max` or look at that branch"
            )
