"""Emulate FasterTransformer's INT8 Swin, from an export alone (docs/reference, section 3.8).

Integers are exact, and every rounding in the kernels' published source is made at the same place: int8 between GEMMs,
float16 in the residual stream, biases and norms. Whole numbers in float32 tensors stand for integers, for fast GEMMs.
Window attention is computed as by the fused or the unfused kernels. Pooled features are float16; the head, outside the
op, is float32. Between the emulated blocks the residual stream can be read; inside a block there are only
FasterTransformer's integers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_quant.backends.artifact import Artifact, Details, get_policy_name
from swin_quant.backends.fastertransformer.layouts import as_read, shifted
from swin_quant.backends.fastertransformer.limits import is_default_scale
from swin_quant.backends.fastertransformer.manifest import Stored, read_export
from swin_quant.backends.fastertransformer.slots import computed_rows, head_dim
from swin_quant.backends.fastertransformer.weights import REDUCTION, Scales
from swin_quant.backends.integer_arithmetic import as_half, gelu_table, normed, product, rounded
from swin_quant.base.errors import UsageError
from swin_quant.models.maps import window_partition, window_reverse
from swin_quant.score.engine import Engine
from swin_quant.score.options import EngineOptions

NAME = "FasterTransformer (emulated)"
NORMALIZE_EPSILON = SOFTMAX_EPSILON = 1e-6
EPSILON = 1e-6
BLOCK_EPSILON = {1: 1e-5, 2: EPSILON}  # V1's norms inside blocks have another epsilon than all others


class Emulator:
    """Images float [B, in, S, S] -> logits float32 [B, classes]. `fused` None: as the target GPU would run.

    With `misread` False, fc1's biases are the right ones (`layouts`).
    """

    def __init__(self, stored: Stored, fused: bool | None = None, device: str = "cpu", misread: bool = True) -> None:
        case, self.device = stored.case, torch.device(device)
        self.g, self.version, self.int8_mode = case.g, case.version, case.int8_mode
        self.fused = case.fused if fused is None else fused
        self.tensors = {name: tensor.to(self.device) for name, tensor in stored.tensors.items()}
        self.tensors |= {name: x.float() for name, x in self.tensors.items() if name.endswith(".weight")}
        self.head = [tensor.to(self.device) for tensor in stored.head]
        self.scales: dict[tuple[int, int], Scales] = {}
        self.gelu: dict[tuple[int, int], Tensor] = {}  # float32 [hidden * 256]: GELU of fc1's int8 sums, by channel
        for place in ((stage, index) for stage, depth in enumerate(self.g.depths) for index in range(depth)):
            at = "layers.{}.blocks.{}.".format(*place)
            s = self.scales[place] = Scales(self.tensors[f"{at}amaxList"].tolist(), self.version)
            bias = self.tensors[f"{at}mlp.fc1.bias"]
            if misread:
                bias = as_read(shifted(bias) if case.fix_gelu_bias else bias, len(bias))
            step, levels = s.step("mlp.fc1._aftergemm_quantizer"), s.levels("mlp.fc2._input_quantizer")
            self.gelu[place] = gelu_table(step, bias, levels).float().flatten()

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        return F.linear(self.features(images).float(), *self.head)

    def features(self, images: Tensor, visit: Callable[[str, Tensor], object] = lambda name, x: None) -> Tensor:
        """The op's result: pooled features, float16 [B, 8E]. UsageError for pictures of another size.

        Calls `visit` with each part's name and the residual stream after it.
        """
        takes = self.g.in_chans, self.g.image_size, self.g.image_size
        if tuple(images.shape[1:]) != takes:
            wanted, given = (" x ".join(map(str, shape)) for shape in (takes, images.shape[1:]))
            raise UsageError(f"the export takes pictures of {wanted}, not {given}")
        x = self.embed(images.to(self.device))
        visit("patch_embed", x)
        for stage, depth in enumerate(self.g.depths):
            for index in range(depth):
                x = self.block(x, stage, index)
                visit(f"layers.{stage}.blocks.{index}", x)
            if stage < len(self.g.depths) - 1:
                x = self.merge(x, stage)
                visit(f"layers.{stage}.downsample", x)
        x = self.norm(x, "norm").half()
        visit("norm", x)
        return x.flatten(1, 2).mean(1, dtype=torch.float32).half()

    def norm(self, x: Tensor, name: str, epsilon: float = EPSILON) -> Tensor:
        """float32 [..., C] of a float16 or float32 x."""
        return normed(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], epsilon)

    def embed(self, images: Tensor) -> Tensor:
        """Images -> the residual stream, float16 [B, R, R, E]: convolution, bias and norm, each rounded."""
        batch, channels, side, _ = images.shape
        kernel, patch = self.tensors["patch_embed.proj.weight"], self.g.patch_size
        x = images.half().float().reshape(batch, channels, side // patch, patch, side // patch, patch)
        x = F.linear(x.permute(0, 2, 4, 1, 3, 5).flatten(3), kernel.flatten(1)).half()
        return self.norm(x + self.tensors["patch_embed.proj.bias"], "patch_embed.norm").half()

    def block(self, x: Tensor, stage: int, index: int) -> Tensor:
        """One block on the residual stream, float16 [B, R, R, C]."""
        s, at, epsilon = self.scales[stage, index], f"layers.{stage}.blocks.{index}.", BLOCK_EPSILON[self.version]
        proj, fc1, fc2 = (self.tensors[f"{at}{layer}.weight"] for layer in ("attn.proj", "mlp.fc1", "mlp.fc2"))
        proj_bias, fc2_bias = (self.tensors[f"{at}{layer}.bias"] for layer in ("attn.proj", "mlp.fc2"))
        before = self.norm(x, f"{at}norm1", epsilon) if self.version == 1 else x.float()
        y = self.attention(rounded(before * s.levels("attn.qkv._input_quantizer")), stage, index)
        y = rounded(product(y, proj) * s.gemm("attn.proj"))
        step, levels = s.step("attn.proj._aftergemm_quantizer"), s.levels("mlp.fc1._input_quantizer")
        if self.version == 1:
            after = x + (y * step).half() + proj_bias
            normalized = rounded(self.norm(after, f"{at}norm2", epsilon) * levels)
            x, y = _where_computed(after, x), _where_computed(normalized, y)
        else:
            given = self.norm(y.half() * as_half(step) + proj_bias, f"{at}norm1", epsilon) + x.float()
            x, y = given.half(), rounded(given * levels)
        y = rounded(product(y, fc1) * s.gemm("mlp.fc1"))
        entries = y + 128 + 256 * torch.arange(y.shape[-1], device=y.device)
        y = self.gelu[stage, index].index_select(0, entries.int().flatten()).view_as(y)
        sums, step = product(y, fc2), s.step("mlp.fc2._aftergemm_quantizer")
        if self.version == 2:
            y = rounded(sums * s.gemm("mlp.fc2")).half() * as_half(step) + fc2_bias
            return (self.norm(y, f"{at}norm2", epsilon) + x.float()).half()
        if self.int8_mode == 1:
            y = rounded(sums * s.gemm("mlp.fc2")) * step
        else:
            y = sums * (s.amax("mlp.fc2._input_quantizer") / 127) * (s.weight("mlp.fc2") / 127)
        return (y + fc2_bias + x.float()).half()

    def attention(self, x: Tensor, stage: int, index: int) -> Tensor:
        """int8 context, at the range of the projection's input, from int8 tokens, both [B, R, R, C] in map order."""
        s, at, heads = self.scales[stage, index], f"layers.{stage}.blocks.{index}.attn.", self.g.heads[stage]
        side, window, (shift, _) = x.shape[1], self.g.window_in_use(stage), self.g.shifts(stage, index)
        windows = window_partition(torch.roll(x, (-shift, -shift), dims=(1, 2)), window)
        sums = rounded(product(windows, self.tensors[f"{at}qkv.weight"]) * s.gemm("attn.qkv"))
        real = sums * s.step("attn.qkv._aftergemm_quantizer") + self.tensors[f"{at}qkv.bias"]
        q, k, v = (
            rounded(part * s.levels(f"attn.matmul_{name}_input_quantizer"))
            for name, part in zip("qkv", real.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4), strict=True)
        )
        if self.version == 2:
            q = _normalized(q, "q", s, self.tensors[f"{at}logit_scale"].float())
            k = _normalized(k, "k", s, 1.0)
        products = q @ k.transpose(-2, -1)  # exact: sums of 32 or 64 products
        scale = head_dim(self.g) ** -0.5 if self.version == 1 else 1.0
        if self.g.qk_scale is not None and not is_default_scale(self.g):
            scale = self.g.qk_scale
        packed = "trt_" if self.fused else ""  # the fused kernels take position bias and mask in the packed form
        added = self.tensors[f"{at}{packed}relative_position_bias"].float()[None]  # [1 or windows, heads, L, L]
        if shift:
            added = added + self.tensors[f"layers.{stage}.{packed}attn_mask"].float()[:, None]
        if self.fused:  # NVIDIA has not published how this kernel rounds inside
            logits = products * (s.fused("q k") * scale)
        else:
            logits = rounded(products * s.gemm("q k")) * scale * s.step("attn.softmax_input_quantizer")
        logits = (logits.unflatten(0, (-1, len(added))) + added).flatten(0, 1)
        if self.fused:
            probabilities = rounded(logits.softmax(-1) * s.fused("a"))
        else:
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            shares = powers * (1 / (powers.sum(-1, keepdim=True) + SOFTMAX_EPSILON))
            probabilities = rounded(shares * s.levels("attn.matmul_a_input_quantizer"))
        context = probabilities @ v  # exact: at most 1024 products, in the largest window
        context = rounded(context * (s.fused("a v") if self.fused else s.gemm("a v"))).transpose(1, 2).flatten(2)
        return torch.roll(window_reverse(context, window, side, side), (shift, shift), dims=(1, 2))

    def merge(self, x: Tensor, stage: int) -> Tensor:
        """float16 [B, R, R, C] -> [B, R / 2, R / 2, 2C]; neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1).

        Its scales are those of the stage's block 0.
        """
        s, at = self.scales[stage, 0], f"layers.{stage}."
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        levels = s.levels(f"{REDUCTION}._input_quantizer")
        x = rounded((self.norm(x, f"{at}downsample.norm") if self.version == 1 else x.float()) * levels)
        sums = product(x, self.tensors[f"{at}{REDUCTION}.weight"])
        if self.version == 1 and self.int8_mode == 2:
            return (sums * (1 / levels * (s.weight(REDUCTION) / 127))).half()
        x = rounded(sums * s.gemm(REDUCTION)) * s.step(f"{REDUCTION}._aftergemm_quantizer")
        return x.half() if self.version == 1 else self.norm(x, f"{at}downsample.norm").half()


def _normalized(x: Tensor, name: str, s: Scales, factor: Tensor | float) -> Tensor:
    """V2: x / |x| * factor, int8 in and out."""
    real = x * s.step(f"attn.matmul_{name}_input_quantizer")
    norm = torch.rsqrt(real.square().sum(-1, keepdim=True) + NORMALIZE_EPSILON) * factor
    return rounded(real * norm * s.levels(f"attn.mha_{name}_input_quantizer"))


def _where_computed(new: Tensor, old: Tensor) -> Tensor:
    """[B, R, R, C]: `new` in the rows that V1's norm after attention computes, `old` in the last rows, which it
    skips."""
    rows, channels = new[..., 0].numel(), new.shape[-1]
    computed = computed_rows(rows, channels)
    if computed == rows:
        return new
    return torch.where((torch.arange(rows, device=new.device) < computed).view_as(new[..., :1]), new, old)


def load(artifact: Artifact, options: EngineOptions = EngineOptions()) -> Engine:
    """An engine from the exported files alone. Attention is fused or not as on the target GPU.

    UsageError for a float export, and for a float type other than float16; SwinQuantError for a changed or
    contradictory file.
    """
    if options.float_type not in (None, "float16"):
        raise UsageError(
            f"‹float_type› {options.float_type}: FasterTransformer's INT8 kernels keep the rest in float16"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("‹device› cuda: torch finds no GPU here")
    stored = read_export(artifact)
    if not stored.case.int8:
        raise UsageError(
            f"{artifact.file}: is a {stored.case.kind} export, and the emulator is of the INT8 kernels: evaluate "
            "its checkpoint instead"
        )
    if options.threads:
        torch.set_num_threads(options.threads)
    emulator = Emulator(stored, device=options.device)
    linears = {slot.name.removesuffix(".weight"): "int8" for slot in stored.entries if slot.container}
    blocks = [name.removesuffix("qkv") for name in linears if name.endswith("qkv")]
    products = {f"{at}{product}": "int8" for at in blocks for product in ("q k", "a v")}
    types = {"patch_embed.proj": "float16", **linears, **products, "head": "float32"}
    known = {
        "sm": stored.case.sm,
        "int8_mode": stored.case.int8_mode,
        "attention": "fused" if emulator.fused else "unfused",
        "float_type": "float16",
    }
    most, details = stored.manifest["arguments"]["max_batch"], Details(known, lambda: types)
    return Engine(NAME, "int8", get_policy_name(artifact), emulator, most, details, device=options.device)


def inside(artifact: Artifact, options: EngineOptions) -> Callable[[Tensor], dict[str, Tensor]]:
    """Maps images [B, 3, S, S] to the residual stream after each part, float16, by the part's name."""
    emulator = load(artifact, options).run

    def run(images: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        emulator.features(images, found.__setitem__)  # type: ignore[attr-defined] # an Emulator
        return found

    return run
