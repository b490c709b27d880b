"""A branch with its window attention on maps of any size as one operator: what it computes, and its files."""

import numpy as np
import onnx
import pytest
import torch
from operator_nodes import (
    assert_near,
    attended,
    compiled,
    linear,
    normalised,
    one_node,
    product,
    stream,
    without_library,
)

from swin_quant.backends.onnx.export import OnnxOptions, export
from swin_quant.backends.onnx.swin.attention_operator import map_branch
from swin_quant.backends.openvino import engine
from swin_quant.models.maps import offset_index
from swin_quant.quant.policy import quantize
from swin_quant.score.difference import compare_batches
from swin_quant.score.options import EngineOptions

PLUGINS = ("map_branch=swin_quant::MapBranch", "mlp=swin_quant::Mlp")
SCALES = [0.03, 0.04, 0.02]  # of q, k and v; with a fourth the softmax is rounded
CASES = {  # heads, depth, window, shift, padded first, cosine, zero point
    "7, shifted as in timm": (3, 32, (7, 7), (3, 3), False, False, None),
    "7, shifted as in detection": (3, 32, (7, 7), (3, 3), True, False, 131),
    "8, cosine": (2, 32, (8, 8), (4, 4), True, True, None),
    "5 x 12, one side shifted": (1, 32, (5, 12), (0, 6), False, False, None),
    "16, cosine, not shifted": (2, 32, (16, 16), (0, 0), False, True, 120),
    "heads of no fast loops": (2, 8, (3, 2), (1, 1), False, True, 7),
    "the same, padded first": (2, 8, (3, 2), (1, 1), True, False, None),
}
SIZES = [(15, 9), (7, 21), (1, 1), (4, 30)]  # padded twice; whole windows of 7; one token; windows higher than the map
given_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
DAILY = ("7, shifted as in timm", "16, cosine, not shifted", "the same, padded first")


def constants(heads, depth, window, is_cosine, zero):
    """The operator's constants, in order."""
    random = np.random.default_rng(0)
    width, (high, wide) = heads * depth, window
    table = random.standard_normal((heads, (2 * high - 1) * (2 * wide - 1))).astype(np.float32)
    lengths = [random.uniform(2, 6, heads).astype("f")] if is_cosine else []
    norm = random.standard_normal((2, width)).astype(np.float32)
    linears = [*linear(random, width, 3 * width, 0.03, zero), *linear(random, width, width, 0.012, None)]
    return [*norm, *linears, table, offset_index(window).int().numpy(), *lengths]


def cut_of(case):
    return {"window": list(case[2]), "shift": list(case[3]), "pad_first": int(case[4])}


def brute_force(x, constants, heads, scales, norm_last, window, shift, pad_first):
    """x plus its branch, window by window, in float64; the mask is cut out of a picture of nine regions."""
    norm, linears = constants[:2], constants[2:12]
    table, index, *lengths = constants[12:]
    (batch, height, width, channels), (high, wide) = x.shape, window
    depth = channels // heads

    def rolled(array):
        missing = [(0, 0), (0, -height % high), (0, -width % wide), (0, 0)]
        steps = [lambda y: np.pad(y, missing), lambda y: np.roll(y, [-by for by in shift], (1, 2))]
        for step in steps if pad_first else steps[::-1]:
            array = step(array)
        return array

    x = x.astype(float)
    y = rolled(x if norm_last else normalised(x, *norm))
    tokens = rolled(1 + np.arange(height * width).reshape(1, height, width, 1))[0, ..., 0]  # 0: padding
    regions = np.zeros(tokens.shape)
    for number, (rows, columns) in enumerate((a, b) for a in range(3) for b in range(3)):
        ends = [[0, size - side, size - by, size] for size, side, by in zip(tokens.shape, window, shift, strict=True)]
        regions[ends[0][rows] : ends[0][rows + 1], ends[1][columns] : ends[1][columns + 1]] = number
    result = np.full((batch, height * width, channels), np.nan)
    for top in range(0, tokens.shape[0], high):
        for left in range(0, tokens.shape[1], wide):
            at = slice(top, top + high), slice(left, left + wide)
            own = product(y[:, at[0], at[1]].reshape(batch, -1, channels), *linears[:5])
            qkv = own.reshape(batch, -1, 3, heads, depth).transpose(2, 0, 3, 1, 4)
            seen = regions[at].flatten() if any(shift) else np.zeros(high * wide)
            added = table.astype(float)[:, index] - 100.0 * (seen[:, None] != seen)
            own = attended(*qkv, added, lengths, scales).transpose(0, 2, 1, 3)
            own = product(own.reshape(batch, -1, channels), *linears[5:])
            there = tokens[at].flatten()
            result[:, there[there > 0] - 1] = own[:, there > 0]
    result = result.reshape(x.shape)
    return x + (normalised(result, *norm) if norm_last else result)


def file_of(constants, case, scales=SCALES, norm_last=False, **changed):
    attributes = {"heads": case[0], "scales": scales, "norm_last": int(norm_last)} | cut_of(case)
    return one_node("MapBranch", constants, ranks=(4, 4), **attributes | changed)


@given_cases
def test_the_compiled_operator_is_brute_force_for_maps_of_any_size(case, library):
    heads, depth, window, _, _, is_cosine, zero = case
    given, channels = constants(heads, depth, window, is_cosine, zero), heads * depth
    for norm_last, scales in ((False, SCALES), (True, [*SCALES, 1 / 127])):
        for threads in (1, 2):
            model = compiled(library, file_of(given, case, scales, norm_last), threads)
            for size in SIZES:
                x = stream(2, *size, channels)
                wanted = brute_force(x, given, heads, scales, norm_last, **cut_of(case))
                for batch in (2, 1, 0):
                    assert_near(model(x[:batch]), wanted[:batch], x[:batch], 1e-4)
        x[1, 0, 0] = np.nan
        found = model(x)
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).any()
        assert model(np.zeros((2, 0, 3, channels), np.float32)).shape == (2, 0, 3, channels)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.kernels] * (name not in DAILY), id=name) for name, case in CASES.items()],
)
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case):
    heads, depth, window, _, _, is_cosine, zero = case
    given = constants(heads, depth, window, is_cosine, zero)
    for norm_last, scales in ((False, SCALES), (True, [*SCALES, 1 / 127])):
        how = {"heads": heads, "scales": scales, "norm_last": int(norm_last)} | cut_of(case)
        for size in SIZES:
            x = stream(2, *size, heads * depth)
            wanted = brute_force(x, given, heads, scales, norm_last, **cut_of(case))
            file = file_of(given, case, scales, norm_last)
            for found in without_library(map_branch, "MapBranch", file, (x, *given), **how):
                assert_near(found, wanted, x, 1e-5)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"window": [7, 8]}, "wants a window of 49 tokens"),
        ({"window": [-7, -7]}, "wants a window of 49 tokens"),
        ({"shift": [0, 7]}, "a shift within it"),
        ({"heads": 5}, "wants heads that divide 96"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(change, said, library):
    case = CASES["7, shifted as in timm"]
    with pytest.raises(RuntimeError, match=said):
        compiled(library, file_of(constants(3, 32, (7, 7), False, None), case, **change))


SHAPE = {"IMG_SIZE": 28, "WINDOW_SIZE": 7, "DEPTHS": [2, 1], "NUM_HEADS": [1, 2], "OUTPUT_KIND": "features"}
KINDS = [("swin", "cpu-operators", "timm"), pytest.param("swinv2", "qdq", "detection", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind, policy, windows", KINDS, ids=["swin", "swinv2"])
def test_openvino_runs_a_backbone_of_any_size_whose_operators_are_compiled(
    kind, policy, windows, calibrated, with_operators, tmp_path
):
    model, card = calibrated(kind, policy, **SHAPE, WINDOWS=windows)
    merging = ("patch_merging=swin_quant::PatchMerging", "patch_embedding=swin_quant::PatchEmbedding")
    artifact = export(model, card, tmp_path, OnnxOptions(target="openvino", plugin=PLUGINS + merging))
    nodes = [node.op_type for node in onnx.load(artifact.file).graph.node if node.domain == "swin_quant"]
    assert nodes == ["PatchEmbedding", *["MapBranch", "Mlp"] * 2, "PatchMerging", "MapBranch", "Mlp"]
    own = engine.load(artifact, EngineOptions(threads=1, float_type="float32"))
    assert with_operators.name in own.details["extensions"]
    quantize(model)
    for batch, *size in [(2, 32, 32), (2, 41, 60), (1, 2, 2), (0, 9, 30)]:
        images = torch.randn(batch, 3, *size)
        with torch.inference_mode():
            expected = model(images)
        found = own(images)
        assert [x.shape for x in found] == [x.shape for x in expected]
        assert batch == 0 or compare_batches([found], [expected])["mean"] < 0.02, size
