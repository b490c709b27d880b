"""Patch merging as one operator: what it computes, on plain loops and vectors, and which files have it."""

import numpy as np
import pytest
from operator_nodes import (
    assert_near,
    compiled,
    in_bfloat16,
    linear,
    normalised,
    one_node,
    product,
    stream,
    without_library,
)

from swin_quant.backends.onnx.swin.int8_operators import patch_merging
from swin_quant.backends.openvino import engine

MERGING = ("patch_merging=swin_quant::PatchMerging",)
CASES = [(32, False, None), (64, True, 131), (6, False, 131), (6, True, None)]  # channels, norm last, zero point


def constants(channels, norm_last, zero, tokens=4 * 25):
    random = np.random.default_rng(channels)
    wide, out = 4 * channels, 2 * channels
    norm = random.standard_normal((2, out if norm_last else wide)).astype(np.float32)
    places = [random.permutation(tokens).astype(np.int32)] if tokens else []
    return [*norm, *linear(random, wide, out, 0.03, zero), *places]


def brute_force(x, constants, norm_last):
    """Products in integers, all else in float64."""
    norm, places = constants[:2], constants[7]
    y = np.concatenate([x.astype(float)[:, places[i::4]] for i in range(4)], -1)
    y = product(y if norm_last else normalised(y, *norm), *constants[2:7])
    return normalised(y, *norm) if norm_last else y


def brute_force_of_map(x, constants, norm_last):
    """A map with zeros around becomes tokens that lie row by row."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // 2), -(-width // 2)
    whole = np.zeros((batch, 2 * rows, 2 * columns, channels))
    whole[:, :height, :width] = x
    places = np.arange(4 * rows * columns).reshape(rows, 2, columns, 2).transpose(0, 2, 3, 1).ravel()
    found = brute_force(whole.reshape(batch, -1, channels), [*constants, places], norm_last)
    return found.reshape(batch, rows, columns, -1)


def file_of(constants, norm_last):
    return one_node("PatchMerging", constants, norm_last=int(norm_last))


def given_to(constants, batch):
    return stream(batch, len(constants[7]), constants[4].shape[0] // 4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_operator_is_brute_force_but_for_ties(case, library):
    given, norm_last = constants(*case), case[1]
    file = file_of(given, norm_last)
    wanted = brute_force(x := given_to(given, 9), given, norm_last)
    for threads in (1, 2):
        model = compiled(library, file, threads)
        for batch in (9, 1, 0):
            assert_near(model(x[:batch]), wanted[:batch])
    x[1] = np.nan
    assert_near(model(x)[0], wanted[0])
    if "bfloat16" in engine.float_types():
        x = in_bfloat16(given_to(given, 2))
        wanted = in_bfloat16(brute_force(x, given, norm_last))
        assert_near(compiled(library, file, in_half=True)(x), wanted, limit=2e-5)  # between two numbers of bfloat16


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case):
    given, norm_last = constants(*case), case[1]
    wanted = brute_force(x := given_to(given, 2), given, norm_last)
    file, arrays = file_of(given, norm_last), (x, *given)
    for found in without_library(patch_merging, "PatchMerging", file, arrays, norm_last=int(norm_last)):
        assert_near(found, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [(6, 4), (5, 7), (1, 1)], ids=str)
def test_maps_are_merged_with_zeros_beyond_their_edges(case, size, library):
    given, norm_last = constants(*case, tokens=0), case[1]
    file = one_node("PatchMerging", given, ranks=(4, 4), norm_last=int(norm_last))
    wanted = brute_force_of_map(x := stream(3, *size, case[0]), given, norm_last)
    for batch in (3, 0):
        assert_near(compiled(library, file, threads=2)(x[:batch]), wanted[:batch])
    for found in without_library(patch_merging, "PatchMerging", file, (x, *given), norm_last=int(norm_last)):
        assert_near(found, wanted)
