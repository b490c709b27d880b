"""The references, chained as an engine chains kernels, against FasterTransformer's emulator: part by part, exactly."""

import pytest
import torch

from swin_quant.backends.cuda.kernels.attention import AttentionKernel
from swin_quant.backends.cuda.kernels.gemm import Epilogue, GemmKernel, gelu_table
from swin_quant.backends.cuda.kernels.patch_embed import PatchEmbedKernel
from swin_quant.backends.cuda.kernels.rows import (
    MergeQuantizeKernel,
    NormQuantizeKernel,
    NormResidualKernel,
    PoolKernel,
)
from swin_quant.backends.cuda.kernels.windows import Windows, whole_map
from swin_quant.backends.fastertransformer.emulator import BLOCK_EPSILON, EPSILON, Emulator
from swin_quant.backends.fastertransformer.export import export
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.fastertransformer.weights import REDUCTION
from swin_quant.cards.card import RunCard
from swin_quant.quant.policy import load_policy

NO_NORM = (None, None)


@pytest.fixture
def stored(tmp_path, calibrated):
    """stored("swin", mode) -> what an export of a calibrated micro model stores."""

    def make(kind, mode):
        policy = load_policy(f"ft-mode{mode}")
        return read_export(
            export(calibrated(kind, policy), RunCard("micro", {}, {}, policy=policy.to_dict()), tmp_path)
        )

    return make


def half(value):
    return torch.tensor(value).half().item()


def int8(*shape):
    return torch.full(shape, 77, dtype=torch.int8)


class Chain:
    """The parts of a network by references alone, on the emulator's tensors."""

    def __init__(self, emulator):
        self.e, self.v1 = emulator, emulator.version == 1

    def linear(self, a, layer, kind, sums, step, out, bias=None, **arguments):
        w, n = layer.to(torch.int8), layer.shape[0]
        epilogue = Epilogue(kind, product_levels=sums, **arguments.pop("epilogue", {}))
        scale = torch.full((n,), step)
        GemmKernel(a, w, scale, None if bias is None else bias.float(), epilogue, out, **arguments).reference()
        return out

    def quantized(self, x, norm, eps, levels, windows):
        out = int8(x[..., 0].numel(), x.shape[-1])
        NormQuantizeKernel(x, *norm, eps, levels, windows, out).reference()
        return out

    def attention(self, x, b, windows):
        a, s = b.attn, b.scales
        third = len(a.qkv) // 3

        def each(value, *parts):
            return torch.cat([torch.full((third,), value(f"attn.{part}_input_quantizer")) for part in parts])

        levels, more = each(s.levels, "matmul_q", "matmul_k", "matmul_v"), {}
        if not self.v1:
            step = each(s.step, "matmul_q", "matmul_k", "matmul_v")
            more = {
                "before": torch.stack([levels, step]),
                "epilogue": {"head_dim": third // a.heads, "unit_epsilon": 1e-6},
            }
            more["lengths"] = torch.ones(3 * third)
            more["lengths"][:third] = a.logit_scale.flatten().repeat_interleave(third // a.heads)
            levels = each(s.levels, "mha_q", "mha_k", "matmul_v")
        qkv = self.linear(
            x, a.qkv, "quantize" if self.v1 else "unit", s.gemm("attn.qkv"), s.step("attn.qkv._aftergemm_quantizer"),
            int8(len(x), 3 * third), a.qkv_bias, levels=levels, **more,
        )  # fmt: skip
        out = int8(len(x), third)
        if self.e.fused:
            how = {"logits_scale": s.fused("q k") * a.qk_scale, "softmax_levels": s.fused("a")}
            how["context_scale"] = s.fused("a v")
        else:
            how = {"logits_scale": a.qk_scale, "softmax_levels": s.levels("attn.matmul_a_input_quantizer")}
            how |= {"context_scale": s.gemm("a v"), "product_levels": s.gemm("q k"), "softmax_epsilon": 1e-6}
            how["product_step"] = s.step("attn.softmax_input_quantizer")
        AttentionKernel(qkv, out, windows, a.heads, position_bias=a.bias, **how).reference()
        return out

    def block(self, x, b):
        s, eps, side = b.scales, BLOCK_EPSILON[self.e.version], x.shape[1]
        windows, flat, rows = Windows(side, b.window, b.shift), whole_map(side), x[..., 0].numel()
        norm1, norm2 = (b.norm1.weight, b.norm1.bias), (b.norm2.weight, b.norm2.bias)
        x, channels, hidden = x.clone(), x.shape[-1], len(b.fc1.kernel)
        y = self.quantized(x, norm1 if self.v1 else NO_NORM, eps, s.levels("attn.qkv._input_quantizer"), windows)
        y = self.attention(y, b, windows)
        step, levels = s.step("attn.proj._aftergemm_quantizer"), s.levels("mlp.fc1._input_quantizer")
        how = {"epilogue": {"half_steps": True}}
        if self.v1:
            self.linear(
                y,
                b.proj.kernel,
                "residual",
                s.gemm("attn.proj"),
                step,
                x,
                b.proj.bias,
                windows=windows,
                residual=x,
                **how,
            )
            y = self.quantized(x, norm2, eps, levels, flat)
        else:
            branch = torch.empty(rows, channels, dtype=torch.float16)
            self.linear(y, b.proj.kernel, "half", s.gemm("attn.proj"), half(step), branch, b.proj.bias, **how)
            y = int8(rows, channels)
            NormResidualKernel(branch, *norm1, eps, x, windows, x, levels, y).reference()
        fc1 = s.step("mlp.fc1._aftergemm_quantizer"), b.fc1.bias, s.levels("mlp.fc2._input_quantizer")
        y = self.linear(y, b.fc1.kernel, "table", s.gemm("mlp.fc1"), 1.0, int8(rows, hidden), table=gelu_table(*fc1))
        sums, step = s.gemm("mlp.fc2"), s.step("mlp.fc2._aftergemm_quantizer")
        if not self.v1:
            branch = torch.empty(rows, channels, dtype=torch.float16)
            self.linear(y, b.fc2.kernel, "half", sums, half(step), branch, b.fc2.bias, **how)
            NormResidualKernel(branch, *norm2, eps, x, flat, x).reference()
            return x
        how = {}
        if self.e.int8_mode == 2:
            how = {"epilogue": {"product_rounds": False}}
            sums, step = s.amax("mlp.fc2._input_quantizer") / 127, s.weight("mlp.fc2") / 127
        self.linear(y, b.fc2.kernel, "residual", sums, step, x, b.fc2.bias, windows=flat, residual=x, **how)
        return x

    def merge(self, x, m):
        s, norm = m.scales, (m.norm.weight, m.norm.bias)
        batch, side, _, channels = x.shape
        levels, rows = s.levels(f"{REDUCTION}._input_quantizer"), batch * side * side // 4
        y = int8(rows, 4 * channels)
        MergeQuantizeKernel(x, *(norm if self.v1 else NO_NORM), EPSILON, levels, y).reference()
        sums, step = s.gemm(REDUCTION), s.step(f"{REDUCTION}._aftergemm_quantizer")
        if self.v1 and self.e.int8_mode == 2:
            sums, step = None, 1 / levels * (s.weight(REDUCTION) / 127)
        out = torch.empty(batch, side // 2, side // 2, 2 * channels, dtype=torch.float16)
        given = out.view(rows, -1) if self.v1 else torch.empty(rows, 2 * channels)
        self.linear(y, m.reduction, "half", sums, step, given)
        if not self.v1:
            NormResidualKernel(given, *norm, EPSILON, None, whole_map(side // 2), out).reference()
        return out

    def embed(self, images):
        patch, norm = self.e.patch, self.e.patch_norm
        side = images.shape[-1] // patch.kernel.shape[-1]
        out = torch.empty(len(images), side, side, len(patch.kernel), dtype=torch.float16)
        kernel = patch.kernel.half().flatten(1)
        PatchEmbedKernel(images, kernel, patch.bias, norm.weight, norm.bias, EPSILON, out, half_steps=True).reference()
        return out

    def pool(self, x):
        out = torch.empty(len(x), x.shape[-1], dtype=torch.float16)
        PoolKernel(x, self.e.norm.weight, self.e.norm.bias, EPSILON, out, half_steps=True).reference()
        return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kind", "mode"), [("swin", 1), ("swin", 2), ("swinv2", 1)])
@torch.inference_mode()
def test_every_part_equals_the_emulator(stored, kind, mode, fused):
    emulator = Emulator(stored(kind, mode), fused=fused)
    chain = Chain(emulator)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    x = emulator.embed(images)
    assert torch.equal(chain.embed(images), x)
    for stage, blocks in enumerate(emulator.blocks):
        for block in blocks:
            assert torch.equal(chain.block(x, block), expected := emulator.block(x, block))
            x = expected
        if stage < len(emulator.mergings):
            assert torch.equal(
                chain.merge(x, emulator.mergings[stage]), expected := emulator.merge(x, emulator.mergings[stage])
            )
            x = expected
    assert torch.equal(chain.pool(x), emulator.features(images))
