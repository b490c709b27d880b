"""Write the launch list of a network for a batch: one function a part, in the order of the forward.

Activations between launches are int8 (or float8) where the next product is quantized, and half elsewhere; the residual
stream `x` is always half. Attention takes tokens in window order: the norm before it gathers them, the projection after
it scatters them.
"""

from dataclasses import replace
from math import prod
from typing import Any

import torch

from swin_quant.backends.cuda.kernels.attention import bias_row
from swin_quant.backends.cuda.kernels.gemm import Epilogue, Kind
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map
from swin_quant.backends.cuda.program import Launch, Program, ScalarRef, TensorRef, make_program
from swin_quant.backends.cuda.spec import EPSILON, REDUCTION, NetworkSpec
from swin_quant.base.errors import UsageError

FT_BLOCK_EPSILON = {1: 1e-5, 2: 1e-6}  # FasterTransformer's norms inside blocks, by version
FT_EPSILON = 1e-6  # its other norms
FT_UNIT_EPSILON = 1e-6  # added to the squared length of q and k
LARGEST_PIXEL = 255
ADDRESSED = 2**31 - 1


def build_program(spec: NetworkSpec, batch: int) -> Program:
    """The program of `spec` for `batch` pictures."""
    g, writer = spec.geometry, _Writer(spec, batch)
    sides = g.image_size, g.image_size
    shape = (batch, *sides, g.in_chans) if spec.pixels else (batch, g.in_chans, *sides)
    images = TensorRef("images", torch.uint8 if spec.pixels else spec.half, shape)
    x = writer.patch_embed(images)
    for stage, depth in enumerate(g.depths):
        for block in range(depth):
            writer.block(x, stage, block)
        if stage < len(g.depths) - 1:
            x = writer.merging(x, stage)
    logits = writer.head(x)
    return make_program(batch, tuple(writer.launches), images, logits)


def check_batch(spec: NetworkSpec, batch: int) -> None:
    """UsageError for a batch with a tensor too large for the kernels' int32 addresses."""
    # for one picture: all grow with the batch
    largest = max(prod(buffer.shape) for buffer in build_program(spec, 1).buffers.values())
    if batch > (most := ADDRESSED // largest):
        raise UsageError(f"‹batch› {batch}: kernels address {ADDRESSED + 1} values of a tensor: at most {most} here")


class _Writer:
    def __init__(self, spec: NetworkSpec, batch: int) -> None:
        self.spec, self.g, self.batch = spec, spec.geometry, batch
        self.launches: list[Launch] = []
        self.block_epsilon = FT_BLOCK_EPSILON[spec.version] if spec.is_ft else EPSILON
        self.epsilon = FT_EPSILON if spec.is_ft else EPSILON

    def patch_embed(self, images: TensorRef) -> TensorRef:
        g, at = self.g, "patch_embed"
        taps, tokens = g.in_chans * g.patch_size**2, self._tokens(0) // self.batch
        x = TensorRef("x0", self.spec.half, (self.batch, g.resolution(0), g.resolution(0), g.embed_dim))
        self._launch(
            "patch_embed",
            f"{at}.proj",
            operations=2 * self._tokens(0) * taps * g.embed_dim,
            products=self.spec.float_type,
            images=images,
            weight=self._packed(f"{at}.proj.weight", g.embed_dim, taps, dtype=self.spec.half),
            bias=self._packed(f"{at}.proj.bias", g.embed_dim),
            norm_weight=self._packed(f"{at}.norm.weight", g.embed_dim) if g.patch_norm else None,
            norm_bias=self._packed(f"{at}.norm.bias", g.embed_dim) if g.patch_norm else None,
            eps=self.epsilon,
            out=x,
            positions=self._packed("absolute_pos_embed", tokens, g.embed_dim) if g.ape else None,
            half_steps=self.spec.is_ft,
            scale=1 / LARGEST_PIXEL if self.spec.pixels else 1.0,
        )
        return x

    def block(self, x: TensorRef, stage: int, number: int) -> None:
        """In place: V1's x + attention(norm1(x)), then x + mlp(norm2(x)); V2's norms are behind its branches."""
        spec, at = self.spec, f"layers.{stage}.blocks.{number}."
        flat = whole_map(self.g.resolution(stage))
        windows = Windows(flat.side, self.g.window_in_use(stage), self.g.shifts(stage, number)[0])
        if spec.version == 1:
            tokens = self._norm_quantize(x, stage, f"{at}attn.qkv", windows, f"{at}norm1")
            context = self._attention(tokens, stage, at, windows)
            self._gemm("residual", context, f"{at}attn.proj", x, windows=windows, residual=x)
            tokens = self._norm_quantize(x, stage, f"{at}mlp.fc1", flat, f"{at}norm2")
            self._gemm("residual", self._fc1(tokens, stage, at), f"{at}mlp.fc2", x, windows=flat, residual=x)
            return
        y, fc1 = (self._tokens(stage), spec.channels(stage)), f"{at}mlp.fc1"
        tokens = self._norm_quantize(x, stage, f"{at}attn.qkv", windows)
        branch = TensorRef(f"{at}attn.proj.output", spec.half, y)
        self._gemm("half", self._attention(tokens, stage, at, windows), f"{at}attn.proj", branch)
        tokens = self._get_input(fc1, stage)
        self._norm_residual(branch, x, f"{at}norm1", windows, out=x, levels=self._levels(fc1), out_quantized=tokens)
        branch = TensorRef(f"{at}mlp.fc2.output", spec.half, y)
        self._gemm("half", self._fc1(tokens, stage, at), f"{at}mlp.fc2", branch)
        self._norm_residual(branch, x, f"{at}norm2", flat, out=x)

    def merging(self, x: TensorRef, stage: int) -> TensorRef:
        """V1 normalises the 4C channels before the reduction, V2 the 2C channels after it."""
        layer, norm = f"layers.{stage}.{REDUCTION}", f"layers.{stage}.downsample.norm"
        wide, channels, tokens = 4 * self.spec.channels(stage), self.spec.channels(stage + 1), self._tokens(stage + 1)
        first, side = self.spec.version == 1, self.g.resolution(stage + 1)
        merged = TensorRef(f"{layer}.input", self._type(layer), (tokens, wide))
        self._launch(
            "merge_quantize",
            norm if first else f"{layer}._input_quantizer",
            x=x,
            **self._normed(norm if first else None, layer, wide),
            eps=self.epsilon,
            out=merged,
        )
        after = TensorRef(f"x{stage + 1}", self.spec.half, (self.batch, side, side, channels))
        if first:
            self._gemm("half", merged, layer, replace(after, shape=(tokens, channels)))
        else:
            dtype = torch.float32 if self.spec.is_ft else self.spec.half
            reduced = TensorRef(f"{layer}.output", dtype, (tokens, channels))
            self._gemm("half", merged, layer, reduced)
            self._norm_residual(reduced, None, norm, whole_map(side), out=after)
        return after

    def head(self, x: TensorRef) -> TensorRef:
        channels, classes = self.spec.channels(len(self.g.depths) - 1), self.g.classes
        pooled = TensorRef("pooled", torch.float32, (self.batch, channels))
        self._launch(
            "pool",
            "norm",
            x=x,
            weight=self._packed("norm.weight", channels),
            bias=self._packed("norm.bias", channels),
            eps=self.epsilon,
            factors=self._packed("norm.factors", channels) if self.spec.exit_factors else None,
            out=pooled,
            half_steps=self.spec.is_ft,
        )
        logits = TensorRef("logits", torch.float32, (self.batch, classes))
        self._launch(
            "gemm",
            "head",
            operations=2 * self.batch * channels * classes,
            products="float32",
            a=pooled,
            w=self._packed("head.weight", classes, channels),
            scale=None,
            bias=self._packed("head.bias", classes),
            epilogue=Epilogue("half"),
            out=logits,
        )
        return logits

    def _norm_quantize(
        self, x: TensorRef, stage: int, layer: str, windows: Windows, norm: str | None = None
    ) -> TensorRef:
        """The input of `layer`, tokens in the order of `windows`; V2 has no norm here."""
        channels, out = self.spec.channels(stage), self._get_input(layer, stage)
        self._launch(
            "norm_quantize",
            norm or f"{layer}._input_quantizer",
            x=x,
            **self._normed(norm, layer, channels),
            eps=self.block_epsilon,
            windows=windows,
            out=out,
        )
        return out

    def _normed(self, norm: str | None, layer: str, channels: int) -> dict[str, Any]:
        """The arguments of a norm whose result `layer` reads: its weight and bias hold the levels, except in
        FasterTransformer's arithmetic."""
        levels = self._levels(layer)
        if norm is None:
            return {"weight": None, "bias": None, "levels": levels}
        times = None if self.spec.is_ft else levels
        found = {word: replace(self._packed(f"{norm}.{word}", channels), times=times) for word in ("weight", "bias")}
        return {**found, "levels": levels if self.spec.is_ft else None}

    def _norm_residual(
        self, y: TensorRef, residual: TensorRef | None, norm: str, windows: Windows, **results: Any
    ) -> None:
        """V2: norm(y) + residual."""
        self._launch(
            "norm_residual",
            norm,
            y=y,
            weight=self._packed(f"{norm}.weight", y.shape[1]),
            bias=self._packed(f"{norm}.bias", y.shape[1]),
            eps=self.block_epsilon if residual else self.epsilon,
            residual=residual,
            windows=windows,
            **results,
        )

    def _attention(self, tokens: TensorRef, stage: int, at: str, windows: Windows) -> TensorRef:
        """Context from tokens, both in window order."""
        heads, head_dim, rows = self.g.heads[stage], self.spec.padded_head_dim(stage), self._tokens(stage)
        width = heads * head_dim  # channels of q, of k and of v, padding included
        layer, length, v2, ft = f"{at}attn.qkv", windows.tokens, self.spec.version == 2, self.spec.is_ft
        quantized, weighs = (f"{at}attn.{product}" in self.spec.quantized for product in ("q k", "a v"))
        qkv = TensorRef(f"{layer}.output", self.spec.operand if quantized else self.spec.half, (rows, 3 * width))
        self._gemm(
            "unit" if v2 else "quantize" if quantized else "half",
            tokens,
            layer,
            qkv,
            levels=self._packed(f"{layer}.levels", 3 * width) if quantized and not self.spec.folds(layer) else None,
            lengths=self._packed(f"{at}attn.lengths", 3 * width) if v2 else None,
            before=self._packed(f"{layer}.before", 2, 3 * width) if v2 and ft else None,
            head_dim=head_dim,
        )
        context = self._get_input(f"{at}attn.proj", stage, width)
        self._launch(
            "attention",
            f"{at}attn",
            operations=4 * rows * length * width,
            products=self.spec.kind(f"{at}attn.q k"),
            qkv=qkv,
            out=context,
            windows=windows,
            heads=heads,
            logits_scale=ScalarRef(f"{at}attn.logits_scale"),
            position_bias=self._packed(
                f"{at}attn.position_bias", heads, length, bias_row(length), dtype=self.spec.half
            ),
            softmax_levels=ScalarRef(f"{at}attn.softmax_levels") if weighs else None,
            context_scale=ScalarRef(f"{at}attn.context_scale"),
        )
        return context

    def _fc1(self, tokens: TensorRef, stage: int, at: str) -> TensorRef:
        """fc1 and GELU, in the type of fc2's operands."""
        hidden, fc2 = self.spec.hidden(stage), f"{at}mlp.fc2"
        out = self._get_input(fc2, stage, hidden)
        if self.spec.is_ft:
            table = self._packed(f"{at}mlp.fc1.gelu", hidden, 256, dtype=torch.int8)
            self._gemm("table", tokens, f"{at}mlp.fc1", out, table=table)
        else:
            self._gemm("gelu", tokens, f"{at}mlp.fc1", out, levels=self._levels(fc2))
        return out

    def _gemm(self, kind: Kind, a: TensorRef, layer: str, out: TensorRef, head_dim: int = 32, **rest: Any) -> None:
        """A product and its epilogue; in FasterTransformer's arithmetic with its roundings (docs/reference, 3.8)."""
        (rows, k), n, last = a.shape, out.shape[-1], layer.rpartition(".")[2]
        times: TensorRef | ScalarRef | None = None  # the levels that scale and bias hold
        if self.spec.folds(layer):
            times = self._levels(f"{layer[:-1]}2") if last == "fc1" else self._packed(f"{layer}.levels", n)
        table = kind == "table"
        scaled = (times or layer in self.spec.quantized) and not table
        biased = not (layer.endswith(REDUCTION) or table)
        epilogue = Epilogue(kind, head_dim=head_dim)
        if self.spec.is_ft:
            wide = self.spec.arithmetic == "ft-mode2" and last in ("fc2", "reduction")
            epilogue = replace(
                epilogue,
                product_levels=ScalarRef(f"{layer}.product_levels"),  # type: ignore[arg-type]  # the engine puts it there
                product_rounds=not wide,
                half_steps=last == "proj" or (last == "fc2" and self.spec.version == 2),
                unit_epsilon=FT_UNIT_EPSILON,
            )
        self._launch(
            "gemm",
            layer,
            operations=2 * rows * n * k,
            products=self.spec.kind(layer),
            a=a,
            w=self._packed(f"{layer}.weight", n, k, dtype=self._type(layer)),
            scale=replace(self._packed(f"{layer}.scale", n), times=times) if scaled else None,
            bias=replace(self._packed(f"{layer}.bias", n), times=times) if biased else None,
            epilogue=epilogue,
            out=out,
            **rest,
        )

    def _launch(self, op: str, name: str, operations: int = 0, products: str = "", **arguments: Any) -> None:
        self.launches.append(Launch(op, name, arguments, operations, products))

    def _tokens(self, stage: int) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.g.resolution(stage) ** 2

    def _type(self, layer: str) -> torch.dtype:
        """The type of a layer's operands."""
        return self.spec.operand if layer in self.spec.quantized else self.spec.half

    def _levels(self, layer: str) -> ScalarRef | None:
        """The factor on a layer's input before it is rounded; None if it is not quantized."""
        return ScalarRef(f"{layer}.input_levels") if layer in self.spec.quantized else None

    def _get_input(self, layer: str, stage: int, channels: int | None = None) -> TensorRef:
        """The input buffer of a linear in a block; `channels` defaults to the stage's."""
        shape = self._tokens(stage), channels or self.spec.channels(stage)
        return TensorRef(f"{layer}.input", self._type(layer), shape)

    def _packed(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorRef:
        return TensorRef(name, dtype, shape, packed=True)
