"""A branch with its window attention as one operator: what it computes, on plain loops and vectors, and its files."""

from itertools import product

import numpy as np
import pytest
from operator_nodes import assert_near, attended, compiled, linear, normalised, one_node, stream, without_library
from operator_nodes import product as int8_product

from swin_quant.backends.onnx.swin.attention_operator import attention_branch
from swin_quant.backends.openvino import engine
from swin_quant.score.options import EngineOptions

BRANCH = ("attention_branch=swin_quant::AttentionBranch",)
SCALES = [0.03, 0.04, 0.02]  # of q, k and v; with a fourth the softmax is rounded
OF_RESULT = 0.012


def constants(heads, depth, window, shift, is_cosine, windows=2, x_zero=None, seed=0):
    """The operator's constants, in order, for a map of `windows` squared windows; int8 without a zero point."""
    random = np.random.default_rng(seed)
    width, side = heads * depth, windows * window

    def by_windows(array):
        array = np.roll(array.reshape(side, side), (-shift, -shift), (0, 1)).reshape(windows, window, windows, window)
        return array.transpose(0, 2, 1, 3).reshape(windows**2, window**2)

    rows = np.arange(side)
    ends = (rows >= shift).astype(int)  # what is rolled round to the other end sees nothing else
    regions = by_windows(2 * ends[:, None] + ends) if shift else np.zeros((1, window**2))
    places = np.stack(list(product(range(window), repeat=2)))
    apart = places[:, None] - places + window - 1
    index = apart[..., 0] * (2 * window - 1) + apart[..., 1]
    table = random.standard_normal((heads, (2 * window - 1) ** 2)).astype(np.float32)
    norm = random.standard_normal((2, width)).astype(np.float32)
    return [
        by_windows(np.arange(side**2)).flatten().astype(np.int32), *norm,
        *linear(random, width, 3 * width, 0.03, x_zero), *linear(random, width, width, OF_RESULT, None),
        table, index.astype(np.int32), regions.astype(np.uint8),
        *([random.uniform(2, 6, heads).astype(np.float32)] if is_cosine else []),
    ]  # fmt: skip


def brute_force(x, constants, heads, scales, norm_last):
    """x plus its branch, token by token: products in integers, all else in float64."""
    places, *norm = constants[:3]
    linears = constants[3:13]
    table, index, regions, *lengths = constants[13:]
    length, width = len(index), x.shape[-1]
    x = x.astype(float)[:, places]
    y = int8_product(x if norm_last else normalised(x, *norm), *linears[:5])
    qkv = y.reshape(len(x), -1, length, 3, heads, width // heads).transpose(3, 0, 1, 4, 2, 5)
    seen = regions[np.arange(qkv.shape[2]) % len(regions)]
    added = table.astype(float)[:, index] - 100.0 * (seen[:, :, None] != seen[:, None])[:, None]
    y = attended(*qkv, added, lengths, scales).swapaxes(2, 3)
    y = int8_product(y.reshape(x.shape), *linears[5:])
    return x + (normalised(y, *norm) if norm_last else y)


def assert_is(found, wanted, x, constants, limit):
    assert_near(found, wanted, x[:, constants[0]], limit)


def file_of(constants, heads, scales=SCALES, norm_last=False):
    return one_node("AttentionBranch", constants, heads=heads, scales=scales, norm_last=int(norm_last))


def given_to(constants, batch):
    return stream(batch, len(constants[0]), len(constants[1]))


CASES = {  # heads, depth, window, shift, cosine, windows a side, zero point
    "7, shifted, an odd number of heads": (3, 32, 7, 3, False),
    "one window, fewer than threads": (4, 32, 7, 0, False, 1),
    "8, cosine, shifted": (2, 32, 8, 4, True),
    "5, cosine, a zero point, three windows": (1, 32, 5, 0, True, 3, 131),
    "12, shifted": (1, 32, 12, 6, False),
    "16, cosine, one window": (2, 32, 16, 0, True, 1),
    "24, shifted, one window": (1, 32, 24, 12, False, 1),
    "24, cosine, a zero point": (2, 32, 24, 0, True, 1, 120),
    "one token": (2, 32, 1, 0, False, 1),
    "heads of no fast loops": (2, 8, 3, 1, False),
    "the same, cosine": (2, 8, 3, 1, True),
}
given_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@given_cases
@pytest.mark.parametrize("is_rounded", [False, True], ids=["softmax", "rounded softmax"])
def test_the_compiled_operator_is_brute_force(case, is_rounded, library):
    given, heads, scales = constants(*case), case[0], SCALES + [1 / 127] * is_rounded
    for norm_last in (False, True):
        wanted = brute_force(x := given_to(given, 3), given, heads, scales, norm_last)
        for threads in (1, 2):
            model = compiled(library, file_of(given, heads, scales, norm_last), threads)
            for batch in (3, 1, 0):
                assert_is(model(x[:batch]), wanted[:batch], x[:batch], given, 1e-4)
        x[1, 0] = np.nan
        found = model(x)
        assert np.isfinite(found[::2]).all() and np.isnan(found[1]).any()


@given_cases
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case):
    given, heads = constants(*case), case[0]
    for norm_last, scales in ((False, SCALES), (True, [*SCALES, 1 / 127])):
        x = given_to(given, 2)
        wanted = brute_force(x, given, heads, scales, norm_last)
        how = {"heads": heads, "scales": scales, "norm_last": int(norm_last)}
        file = file_of(given, heads, scales, norm_last)
        for found in without_library(attention_branch, "AttentionBranch", file, (x, *given), **how):
            assert_is(found, wanted, x, given, 1e-5)


@pytest.mark.parametrize(
    "place, value, said",
    [
        (0, lambda old: old + 1, "must be within 0 and 35"),  # reads behind the picture
        (14, lambda old: old - 25, "must be within 0 and 24"),
        (13, lambda old: old.astype(np.float64), "must be a constant, not f64"),
        (9, lambda old: np.int8(3), "cannot have a zero point"),
        (15, lambda old: old[:, :4], "are not windows of 9 tokens"),
        (5, lambda old: old[:, :9], "and must have"),
        (10, lambda old: old[None], "its weights are"),
    ],
)
def test_constants_that_do_not_fit_are_refused(place, value, said, library):
    given = constants(2, 8, 3, 1, False)
    given[place] = value(given[place])
    with pytest.raises(RuntimeError, match=said):
        compiled(library, file_of(given, 2))


@pytest.mark.slow
@pytest.mark.parametrize("float_type", ["float32", "bfloat16"])
def test_openvino_runs_a_file_whose_blocks_are_two_operators(float_type, exported, with_operators, exact_on, images):
    exact_on("openvino")
    if float_type not in engine.float_types():
        pytest.skip(f"no {float_type}")
    options = EngineOptions(threads=1, float_type=float_type)
    both = {"plugin": (*BRANCH, "mlp=swin_quant::Mlp")}
    plain, own = (engine.load(exported("swinv2", "cpu-operators", **one), options) for one in ({}, both))
    assert with_operators.name in own.details["extensions"]
    wanted, found = plain(images), own(images)
    assert float((found - wanted).square().sum() / wanted.square().sum()) < 1e-3
