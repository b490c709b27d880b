"""From what a network computes to the launch list of a batch: one function a part, in the order of the forward.

Activations between launches are int8 or half by which products are int8; the residual stream `x` is half throughout.
Tokens go through attention in the order of windows: the norm in front gathers them, the projection scatters them.
"""

from typing import Any

import torch

from swin_quant.backends.cuda.program import Launch, Program, ScalarRef, TensorRef, make_program
from swin_quant.backends.cuda.spec import NetworkSpec

BLOCK_EPSILON = EPSILON = 1e-5  # of torch's LayerNorm, and so of the models
FT_BLOCK_EPSILON = {1: 1e-5, 2: 1e-6}
FT_EPSILON = 1e-6
LARGEST_INDEX = 2**31 - 1  # of an element in a tensor that a kernel addresses


def program_of(spec: NetworkSpec, batch: int) -> Program:
    """The program of `spec` for `batch` pictures."""
    return _Writer(spec, batch).program()


class _Writer:
    def __init__(self, spec: NetworkSpec, batch: int) -> None:
        self.spec, self.g, self.batch = spec, spec.geometry, batch
        self.launches: list[Launch] = []
        self.block_epsilon = FT_BLOCK_EPSILON[spec.version] if spec.is_ft else BLOCK_EPSILON
        self.epsilon = FT_EPSILON if spec.is_ft else EPSILON

    def program(self) -> Program:
        g = self.g
        side = g.image_size
        images = self._buffer("images", self.spec.half, self.batch, g.in_chans, side, side)
        x = self._patch_embed(images)
        for stage, depth in enumerate(g.depths):
            for block in range(depth):
                at = f"layers.{stage}.blocks.{block}."
                block_of_version = self._block_v1 if self.spec.version == 1 else self._block_v2
                block_of_version(x, stage, at, g.shift(stage, block))
            if stage < len(g.depths) - 1:
                x = self._merging(x, stage)
        logits = self._head(x)
        return make_program(self.batch, tuple(self.launches), images, logits)

    def _patch_embed(self, images: TensorRef) -> TensorRef:
        g, at = self.g, "patch_embed"
        taps = g.in_chans * g.patch_size**2
        x = self._buffer("x0", self.spec.half, self.batch, g.resolution(0), g.resolution(0), g.embed_dim)
        self._launch(
            "patch_embed",
            f"{at}.proj",
            operations=2 * self._tokens(0) * taps * g.embed_dim,
            products=self.spec.float_type,
            images=images,
            weight=self._packed(f"{at}.proj.weight", self.spec.half, g.embed_dim, taps),
            bias=self._vector(f"{at}.proj.bias", g.embed_dim),
            norm_weight=self._vector(f"{at}.norm.weight", g.embed_dim) if g.patch_norm else None,
            norm_bias=self._vector(f"{at}.norm.bias", g.embed_dim) if g.patch_norm else None,
            eps=self.epsilon,
            out=x,
        )
        return x

    def _block_v1(self, x: TensorRef, stage: int, at: str, shift: int) -> None:
        windows = self._windows(stage, shift)
        tokens = self._norm_quantize(x, stage, f"{at}attn.qkv", windows, f"{at}norm1")
        context = self._attention(tokens, stage, at, windows, unit=False)
        self._gemm(
            context, f"{at}attn.proj", self.spec.channels(stage), out=x, residual=x, windows=windows, kind="residual"
        )
        flat = self._windows(stage)
        tokens = self._norm_quantize(x, stage, f"{at}mlp.fc1", flat, f"{at}norm2")
        hidden = self._fc1(tokens, stage, at)
        self._gemm(hidden, f"{at}mlp.fc2", self.spec.channels(stage), out=x, residual=x, windows=flat, kind="residual")

    def _block_v2(self, x: TensorRef, stage: int, at: str, shift: int) -> None:
        windows, flat, channels = self._windows(stage, shift), self._windows(stage), self.spec.channels(stage)
        tokens = self._norm_quantize(x, stage, f"{at}attn.qkv", windows)
        context = self._attention(tokens, stage, at, windows, unit=True)
        y = self._buffer(f"{at}attn", self.spec.half, self._tokens(stage), channels)
        self._gemm(context, f"{at}attn.proj", channels, out=y, kind="half")
        tokens = self._input_of(f"{at}mlp.fc1", stage)
        self._norm_residual(y, x, stage, f"{at}norm1", windows, tokens, f"{at}mlp.fc1")
        hidden = self._fc1(tokens, stage, at)
        y = self._buffer(f"{at}mlp", self.spec.half, self._tokens(stage), channels)
        self._gemm(hidden, f"{at}mlp.fc2", channels, out=y, kind="half")
        self._norm_residual(y, x, stage, f"{at}norm2", flat)

    def _merging(self, x: TensorRef, stage: int) -> TensorRef:
        """V1 norms the 4C channels in front of the reduction, V2 the 2C behind it."""
        at, layer = f"layers.{stage}.downsample.", f"layers.{stage}.downsample.reduction"
        wide, channels, tokens = 4 * self.spec.channels(stage), self.spec.channels(stage + 1), self._tokens(stage + 1)
        first = self.spec.version == 1
        merged = self._buffer(f"{at}merged", self._type(layer), tokens, wide)
        self._launch(
            "merge_quantize",
            f"{at}merge",
            x=x,
            weight=self._vector(f"{at}norm.weight", wide) if first else None,
            bias=self._vector(f"{at}norm.bias", wide) if first else None,
            eps=self.epsilon,
            levels=self._levels(layer),
            out=merged,
        )
        side = self.g.resolution(stage + 1)
        after = self._buffer(f"x{stage + 1}", self.spec.half, self.batch, side, side, channels)
        if first:
            self._gemm(merged, layer, channels, out=after, kind="half", biased=False)
            return after
        y = self._buffer(f"{at}reduced", self.spec.half, tokens, channels)
        self._gemm(merged, layer, channels, out=y, kind="half", biased=False)
        self._norm_residual(y, None, stage + 1, f"{at}norm", self._windows(stage + 1), out=after)
        return after

    def _head(self, x: TensorRef) -> TensorRef:
        last = len(self.g.depths) - 1
        channels = self.spec.channels(last)
        pooled = self._buffer("pooled", torch.float32, self.batch, channels)
        self._launch(
            "pool",
            "norm",
            x=x,
            weight=self._vector("norm.weight", channels),
            bias=self._vector("norm.bias", channels),
            eps=self.epsilon,
            out=pooled,
        )
        logits = self._buffer("logits", torch.float32, self.batch, self.g.classes)
        self._launch(
            "head",
            "head",
            operations=2 * self.batch * channels * self.g.classes,
            products="float32",
            x=pooled,
            weight=self._packed("head.weight", torch.float32, self.g.classes, channels),
            bias=self._vector("head.bias", self.g.classes),
            out=logits,
        )
        return logits

    def _norm_quantize(self, x: TensorRef, stage: int, layer: str, windows: Any, norm: str | None = None) -> TensorRef:
        """Tokens for `layer`, in the order of `windows`; V2 has no norm there."""
        channels, out = self.spec.channels(stage), self._input_of(layer, stage)
        self._launch(
            "norm_quantize",
            norm or f"{layer}._input_quantizer",
            x=x,
            weight=self._vector(f"{norm}.weight", channels) if norm else None,
            bias=self._vector(f"{norm}.bias", channels) if norm else None,
            eps=self.block_epsilon,
            levels=self._levels(layer),
            windows=windows,
            out=out,
        )
        return out

    def _norm_residual(
        self, y: TensorRef, x: TensorRef | None, stage: int, norm: str, windows: Any,
        tokens: TensorRef | None = None, layer: str = "", out: TensorRef | None = None,
    ) -> None:  # fmt: skip
        """x + norm(y) into `out`, x itself if None, and into `tokens` as `layer` reads it."""
        channels = self.spec.channels(stage)
        self._launch(
            "norm_residual",
            norm,
            y=y,
            weight=self._vector(f"{norm}.weight", channels),
            bias=self._vector(f"{norm}.bias", channels),
            eps=self.block_epsilon if x else self.epsilon,
            residual=x,
            windows=windows,
            out=out or x,
            levels=self._levels(layer),
            quantized=tokens,
        )

    def _input_of(self, layer: str, stage: int) -> TensorRef:
        """What a linear of a block reads, of as many channels as the stage has."""
        return self._buffer(f"{layer}.input", self._type(layer), self._tokens(stage), self.spec.channels(stage))

    def _attention(self, tokens: TensorRef, stage: int, at: str, windows: Any, unit: bool) -> TensorRef:
        """From tokens to the context, both in the order of windows."""
        heads, width, rows = self.g.heads[stage], self.spec.attention_width(stage), self._tokens(stage)
        length, int8 = self.g.window_in_use(stage) ** 2, self.spec.kind(f"{at}attn.q k") == "int8"
        qkv = self._buffer(f"{at}attn.qkv.output", torch.int8 if int8 else self.spec.half, rows, 3 * width)
        lengths = self._vector(f"{at}attn.lengths", 3 * width) if unit else None
        levels = self._vector(f"{at}attn.qkv.levels", 3 * width) if int8 else None
        kind = "unit" if unit else "quantize" if int8 else "half"
        self._gemm(tokens, f"{at}attn.qkv", 3 * width, out=qkv, kind=kind, levels=levels, lengths=lengths)
        context = self._buffer(f"{at}attn.context", self._type(f"{at}attn.proj"), rows, width)
        self._launch(
            "attention",
            f"{at}attn",
            operations=4 * rows * length * width,
            products="int8" if int8 else self.spec.float_type,
            qkv=qkv,
            heads=heads,
            windows=windows,
            logits_scale=ScalarRef(f"{at}attn.logits_scale"),
            position_bias=self._packed(f"{at}attn.position_bias", self.spec.half, heads, length, length),
            softmax_levels=ScalarRef(f"{at}attn.softmax_levels") if self.spec.kind(f"{at}attn.a v") == "int8" else None,
            context_scale=ScalarRef(f"{at}attn.context_scale"),
            out=context,
        )
        return context

    def _fc1(self, tokens: TensorRef, stage: int, at: str) -> TensorRef:
        """fc1 with its GELU, as fc2 reads it."""
        hidden = self.spec.hidden(stage)
        out = self._buffer(f"{at}mlp.fc2.input", self._type(f"{at}mlp.fc2"), self._tokens(stage), hidden)
        self._gemm(tokens, f"{at}mlp.fc1", hidden, out=out, kind="gelu", levels=self._levels(f"{at}mlp.fc2"))
        return out

    def _gemm(
        self, a: TensorRef, layer: str, n: int, *, out: TensorRef, kind: str, levels: Any = None, lengths: Any = None,
        residual: TensorRef | None = None, windows: Any = None, biased: bool = True,
    ) -> None:  # fmt: skip
        rows, k = a.shape
        int8 = self._type(layer) is torch.int8
        self._launch(
            "gemm",
            layer,
            operations=2 * rows * n * k,
            products=self.spec.kind(layer),
            a=a,
            w=self._packed(f"{layer}.weight", self._type(layer), n, k),
            scale=self._vector(f"{layer}.scale", n) if int8 else None,
            bias=self._vector(f"{layer}.bias", n) if biased else None,
            epilogue=kind,
            levels=levels,
            lengths=lengths,
            residual=residual,
            windows=windows,
            out=out,
        )

    def _launch(self, op: str, name: str, operations: int = 0, products: str = "", **arguments: Any) -> None:
        given = {key: value for key, value in arguments.items() if value is not None}
        self.launches.append(Launch(op, name, given, operations, products))

    def _tokens(self, stage: int) -> int:
        """Of a batch."""
        return self.batch * self.g.resolution(stage) ** 2

    def _windows(self, stage: int, shift: int | None = None) -> Any:
        """Those of attention; without a shift, even of 0, the order of the map."""
        side = self.g.resolution(stage)
        return (side, side, 0) if shift is None else (side, self.g.window_in_use(stage), shift)

    def _type(self, layer: str) -> torch.dtype:
        """That of a layer's operands."""
        return torch.int8 if layer in self.spec.int8 else self.spec.half

    def _levels(self, layer: str) -> ScalarRef | None:
        """By which a layer's input is multiplied before it is rounded; None if it is not."""
        return ScalarRef(f"{layer}.input_levels") if layer in self.spec.int8 else None

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> TensorRef:
        return TensorRef(name, dtype, shape)

    def _packed(self, name: str, dtype: torch.dtype, *shape: int) -> TensorRef:
        return TensorRef(name, dtype, shape, packed=True)

    def _vector(self, name: str, size: int) -> TensorRef:
        return self._packed(name, torch.float32, size)
