"""The emulator against a block computed value by value in loops, and against the fake-quantized model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import share

from swin_quant.backends.fastertransformer.emulator import Emulator
from swin_quant.backends.fastertransformer.export import FasterTransformerOptions, export
from swin_quant.backends.fastertransformer.manifest import read_export
from swin_quant.backends.integer_arithmetic import EXACT_PRODUCTS, product
from swin_quant.cards.card import RunCard
from swin_quant.data.picture_set import PictureSet
from swin_quant.data.sources import open_pictures
from swin_quant.loading import ModelFile
from swin_quant.quant.policy import load_policy
from swin_quant.score.engine import torch_engines
from swin_quant.verbs.calibrate import calibrate

f32, f16 = np.float32, np.float16


def q8(x):
    return int(np.clip(np.rint(f32(x)), -128, 127))


def all_q8(values):
    return np.clip(np.rint(values.astype(f32)), -128, 127).astype(int).tolist()


def amax(module, node):
    return float(module.get_submodule(f"{node}_quantizer").amax)


def integers(linear):
    weight = linear.weight.detach().half().double().numpy()
    return np.clip(np.rint((weight * 127 / amax(linear, "_weight")).astype(f32)), -128, 127).astype(np.int64)


def half(parameter):
    return parameter.detach().half().numpy()


def norm(x, layer, epsilon):
    x = np.asarray(x, np.float64)
    scaled = (x - x.mean()) / np.sqrt(x.var() + epsilon)
    return (scaled * half(layer.weight).astype(np.float64) + half(layer.bias).astype(np.float64)).astype(f32)


def alpha(linear):
    return f32(amax(linear, "_input") * amax(linear, "_weight") / (127 * amax(linear, "_aftergemm")))


def gemm(row, linear):
    """Row of int8 -> row of int8."""
    return all_q8((integers(linear) @ np.array(row, np.int64)).astype(f32) * alpha(linear))


def position_bias(attn, version, window):
    """[heads, L, L], docs/reference, sections 1.2 and 3.5."""
    length, heads = window * window, attn.heads
    bias = np.zeros((heads, length, length), f32)
    for a in range(length):
        for b in range(length):
            dy, dx = a // window - b // window, a % window - b % window
            if version == 1:
                row = (dy + window - 1) * (2 * window - 1) + dx + window - 1
                bias[:, a, b] = attn.relative_position_bias_table[row].detach().numpy()
            else:
                z = 8 * np.array([dy, dx]) / (window - 1)
                point = torch.tensor(np.sign(z) * np.log2(np.abs(z) + 1) / 3).float()
                with torch.no_grad():
                    bias[:, a, b] = 16 * torch.sigmoid(attn.cpb_mlp(point)).numpy()
    return bias.astype(f16).astype(f32)


def attend(tokens, places, block, version, side, fused):
    """int8 tokens {(y, x): row} of one window, `places` in the rolled map -> int8 context rows, before proj."""
    attn, window, shift = block.attn, block.window, block.shift
    a = {name: amax(attn, f"matmul_{name}_input") for name in "qkva"}
    heads, bias = attn.heads, position_bias(attn, version, window)
    qkv_bias = half(attn.qkv.effective_bias()).astype(f32)
    step = f32(amax(attn.qkv, "_aftergemm") / 127)
    parts = []
    for place in places:
        real = [f32(v) * step + b for v, b in zip(gemm(tokens[place], attn.qkv), qkv_bias, strict=True)]
        parts.append({name: real[i * len(real) // 3 : (i + 1) * len(real) // 3] for i, name in enumerate("qkv")})
    parts = [{n: [q8(v * f32(127 / a[n])) for v in row] for n, row in part.items()} for part in parts]
    d = len(parts[0]["q"]) // heads
    region = [sum((y >= side - window, y >= side - shift)) * 3 + sum((x >= side - window, x >= side - shift))
              for y, x in places]  # fmt: skip
    out = [[0] * (heads * d) for _ in places]
    ranges = {"q": a["q"], "k": a["k"]}
    for h in range(heads):
        rows = [{name: row[h * d : (h + 1) * d] for name, row in part.items()} for part in parts]
        if version == 2:
            ranges = {name: amax(attn, f"mha_{name}_input") for name in "qk"}
            scale = f32(f16(np.exp(f32(min(f16(attn.logit_scale[h].item()), f16(np.log(100)))))))
            for row in rows:
                for name, factor in (("q", scale), ("k", f32(1))):
                    real = [f32(v) * f32(a[name] / 127) for v in row[name]]
                    length = f32(1 / np.sqrt(np.float64(sum(v * v for v in real)) + 1e-6)) * factor
                    row[name] = [q8(v * length * f32(127 / ranges[name])) for v in real]
        qk_scale = f32(d**-0.5) if version == 1 else f32(1)
        for i, row in enumerate(rows):
            logits = []
            for j, other in enumerate(rows):
                product = f32(int(np.dot(row["q"], other["k"])))
                if fused:
                    logit = product * f32(ranges["q"] * ranges["k"] / 127**2) * qk_scale
                else:
                    limit = amax(attn, "softmax_input")
                    logit = qk_scale * q8(product * f32(ranges["q"] * ranges["k"] / (127 * limit))) * f32(limit / 127)
                logits.append(logit + bias[h, i, j] + f32(-100 if shift and region[i] != region[j] else 0))
            powers = np.exp(np.array(logits, np.float64) - max(logits))
            shares = powers / (powers.sum() + (0 if fused else 1e-6))
            probabilities = [q8(share * (127 / a["a"])) for share in shares]
            for c in range(d):
                product = sum(p * other["v"][c] for p, other in zip(probabilities, rows, strict=True))
                out[i][h * d + c] = q8(f32(product) * f32(a["a"] * a["v"] / (127 * amax(attn.proj, "_input"))))
    return out


def gelu(x):
    """float16 in and out, rounded after each operation."""
    inner = f16(0.7978845608028654) * (x + f16(0.044715) * x * x * x)
    return x * (f16(0.5) * (f16(1) + f16(np.tanh(f32(inner)))))


def misread(bias):
    """[n] as the GELU kernel reads it: three places off from channel 4096 on (section 3.9), zeros past the end."""
    return np.concatenate([bias[:4096], bias[4099:], np.zeros(3, f16)]) if len(bias) > 4096 else bias


def by_hand(block, x, version, mode, fused, fc1_bias=misread, lost=0):
    """float16 [R, R, C] -> float16 [R, R, C]: docs/reference, section 3.8, value by value.

    V1's norm after attention leaves out `lost` rows at the end (section 3.9).
    """
    side, window, shift = len(x), block.window, block.shift
    epsilon = 1e-5 if version == 1 else 1e-6
    levels = f32(127 / amax(block.attn.qkv, "_input"))
    tokens, context = {}, {}
    for y in range(side):
        for column in range(side):
            row = x[(y + shift) % side, (column + shift) % side]
            row = norm(row, block.norm1, epsilon) if version == 1 else row.astype(f32)
            tokens[y, column] = [q8(v * levels) for v in row]
    for top in range(0, side, window):
        for left in range(0, side, window):
            places = [(top + i, left + j) for i in range(window) for j in range(window)]
            rows = attend(tokens, places, block, version, side, fused)
            for (y, column), row in zip(places, rows, strict=True):
                context[(y + shift) % side, (column + shift) % side] = row
    out = np.empty_like(x)
    proj, fc1, fc2 = block.attn.proj, block.mlp.fc1, block.mlp.fc2
    proj_step, fc2_step = (f32(amax(layer, "_aftergemm") / 127) for layer in (proj, fc2))
    for (y, column), row in context.items():
        branch, skip = gemm(row, proj), x[y, column]
        if version == 1:
            skip = [
                f16(f16(s + f16(f32(v) * proj_step)) + b) for s, v, b in zip(skip, branch, half(proj.bias), strict=True)
            ]
            given = norm(skip, block.norm2, epsilon)
        else:
            real = [f16(f16(f16(v) * f16(proj_step)) + b) for v, b in zip(branch, half(proj.bias), strict=True)]
            given = norm(real, block.norm1, epsilon) + skip.astype(f32)
            skip = given.astype(f16)
        given = [q8(v * f32(127 / amax(fc1, "_input"))) for v in given]
        if side * y + column >= side * side - lost:
            skip, given = x[y, column], branch
        hidden = gemm(given, fc1)
        step, scale = f16(amax(fc1, "_aftergemm") / 127), f16(127 / amax(fc2, "_input"))
        hidden = all_q8(gelu(np.array(hidden, f16) * step + fc1_bias(half(fc1.bias))) * scale)
        skip = np.asarray(skip).astype(f32)
        if version == 2:
            real = [
                f16(f16(f16(v) * f16(fc2_step)) + b) for v, b in zip(gemm(hidden, fc2), half(fc2.bias), strict=True)
            ]
            out[y, column] = (norm(real, block.norm2, epsilon) + skip).astype(f16)
        elif mode == 1:
            real = np.array([f32(v) * fc2_step for v in gemm(hidden, fc2)])
            out[y, column] = (real + half(fc2.bias).astype(f32) + skip).astype(f16)
        else:
            factor = f32(f32(amax(fc2, "_input")) / f32(127)), f32(f32(amax(fc2, "_weight")) / f32(127))
            real = np.array([f32(int(np.dot(w, hidden))) * factor[0] * factor[1] for w in integers(fc2)])
            out[y, column] = (real + half(fc2.bias).astype(f32) + skip).astype(f16)
    return out


def assert_by_hand(got, expected, block):
    """All are equal on this CPU. On another, the sums of a norm may round one value to the next integer."""
    got, expected = got.float().numpy(), expected.astype(f32)
    step = amax(block.mlp.fc2, "_aftergemm") / 127
    assert np.mean(got == expected) > 0.99 and np.abs(got - expected).max() < 4 * step


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("kind", "mode"), [("swin", 1), ("swin", 2), ("swinv2", 1)])
def test_a_block_computed_by_hand(exported, kind, mode, fused):
    artifact, model = exported(kind, mode)
    emulator = Emulator(read_export(artifact), fused)
    version = 1 if kind == "swin" else 2
    for stage, index, side, channels in ((0, 1, 4, 32), (1, 0, 2, 64)):  # shifted with a mask; two heads, one window
        x = torch.randn(1, side, side, channels, generator=torch.Generator().manual_seed(side)).half()
        block = model.layers[stage].blocks[index]
        assert (block.shift > 0) == (stage == 0)
        expected = by_hand(block, x[0].numpy(), version, mode, fused)
        assert_by_hand(emulator.block(x, stage, index)[0], expected, block)


@pytest.mark.parametrize("fix", [False, True])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_wide_block_computed_by_hand(calibrated, card, tmp_path, kind, fix):
    """4352 hidden channels: the bias is misread, or stored so that it is read rightly."""
    model = calibrated(kind, MLP_RATIO=68.0)  # 64 * 68
    stored = read_export(export(model, card(), tmp_path, FasterTransformerOptions(fix_gelu_bias=fix)))
    x = torch.randn(1, 2, 2, 64).half()
    block = model.layers[1].blocks[0]
    expected = by_hand(block, x[0].numpy(), int(kind == "swinv2") + 1, 1, True, np.array if fix else misread)
    emulator, images = Emulator(stored), torch.randn(2, 3, 8, 8)
    assert_by_hand(emulator.block(x, 1, 0)[0], expected, block)
    assert torch.equal(emulator(images), Emulator(stored, misread=False)(images)) is fix  # what block 0 reads


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_rows_that_the_kernel_leaves_out(calibrated, card, tmp_path, batch):
    """9 tokens of 64 channels a picture, in fours: one kernel block for each whole four of the batch."""
    model = calibrated("swin", IMG_SIZE=12, WINDOW_SIZE=3)
    emulator = Emulator(read_export(export(model, card(), tmp_path)))
    x = torch.randn(batch, 3, 3, 64).half()
    block = model.layers[1].blocks[0]
    got = emulator.block(x, 1, 0)
    lost = 9 * batch - sum(4 for _ in range(9 * batch // 4))
    assert lost == {1: 1, 2: 2, 4: 0}[batch]
    for i, picture in enumerate(x.numpy()):
        expected = by_hand(block, picture, 1, 1, True, lost=lost if i == batch - 1 else 0)
        assert_by_hand(got[i], expected, block)


@pytest.mark.parametrize(("kind", "mode"), [("swin", 1), ("swin", 2), ("swinv2", 1)])
def test_patch_merging_computed_by_hand(exported, kind, mode):
    artifact, model = exported(kind, mode)
    emulator = Emulator(read_export(artifact))
    x = torch.randn(1, 4, 4, 32).half()
    got = emulator.merge(x, 0)[0].float().numpy()
    merging = model.layers[0].downsample
    linear, x = merging.reduction, x[0].numpy()
    step = f32(amax(linear, "_aftergemm") / 127)
    for y in range(2):
        for column in range(2):
            parts = [x[2 * y + i, 2 * column + j] for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))]
            row = np.concatenate(parts).astype(f32)
            row = norm(row, merging.norm, 1e-6) if kind == "swin" else row
            row = [q8(v * f32(127 / amax(linear, "_input"))) for v in row]
            if mode == 2:
                factor = f32(amax(linear, "_input") / 127 * amax(linear, "_weight") / 127)
                expected = np.array([f32(int(np.dot(w, row))) for w in integers(linear)]) * factor
            else:
                expected = np.array([f32(v) * step for v in gemm(row, linear)])
            expected = norm(expected, merging.norm, 1e-6) if kind == "swinv2" else expected
            np.testing.assert_allclose(got[y, column], expected.astype(f16).astype(f32), rtol=2e-3, atol=2e-3)


@given(st.integers(1, 3 * EXACT_PRODUCTS), st.integers(0, 99), st.booleans())
def test_int8_gemms_are_exact(k, seed, extreme):
    generator = torch.Generator().manual_seed(seed)
    low, high = (127, 128) if extreme else (-128, 128)
    x, w = (torch.randint(low, high, (3, k), generator=generator) for _ in range(2))
    assert torch.equal(product(x.float(), w.float()), (x @ w.T).float())


def test_a_picture_s_features_do_not_depend_on_its_batch(exported):
    """To the bit in FasterTransformer's op. The head after it is a float32 product, whose sums have any order."""
    emulator = Emulator(read_export(exported("swin")[0]))
    images = torch.randn(6, 3, 8, 8)
    assert torch.equal(emulator.features(images)[2:3], emulator.features(images[2:3]))
    weight, bias = emulator.head
    terms = emulator.features(images[2:3]).float().abs() @ weight.abs().T + bias.abs()
    bound = (weight.shape[1] + 1) * torch.finfo(torch.float32).eps * terms
    assert torch.all((emulator(images)[2:3] - emulator(images[2:3])).abs() <= bound)


@pytest.mark.parametrize("kind, mode, fused", share([("swin", 1, True), ("swin", 2, False), ("swinv2", 1, True)], 3))
def test_a_trained_model_on_real_pictures(shared, tmp_path, kind, mode, fused):
    """docs/reference, section 8: mean |logit difference| between INT8 op and fake-quant model below 0.1.

    Calibrated on 40 pictures; 32 of the pictures that it was not trained on.
    """
    file, folder = shared / "checkpoints" / f"{kind}_micro_cifar10.pth", str(shared / "data" / "cifar10")
    done = calibrate(ModelFile(str(file)), PictureSet(folder, count=40, zip_mode=True), f"ft-mode{mode}")
    validation, preprocess = open_pictures(folder, "val", zip_mode=True), done.preprocess
    pictures = torch.stack([preprocess(validation.read(i)) for i in range(0, 4992, 156)])
    policy = load_policy(f"ft-mode{mode}")
    card = RunCard(kind, {}, {}, policy=policy.to_dict())
    emulator = Emulator(read_export(export(done.module, card, tmp_path)), fused)
    fake = torch_engines(done.module, torch.device("cpu"), None, [policy])[f"int8 ft-mode{mode}"]
    with torch.inference_mode():
        expected, got = fake(pictures), emulator(pictures)
    assert (got - expected).abs().mean() < 0.04  # measured 0.014 to 0.019
    assert (got.argmax(1) == expected.argmax(1)).float().mean() >= 0.95
