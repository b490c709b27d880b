"""Patch embedding as one operator: what it computes, on plain loops and vectors, and which files have it."""

import numpy as np
import pytest
from operator_nodes import compiled, in_bfloat16, normalised, one_node, stream, without_library

from swin_quant.backends.onnx.swin.patch_embedding import patch_embedding
from swin_quant.backends.openvino import engine

CASES = [(96, 3, 4), (64, 1, 5), (32, 4, 8), (20, 3, 4), (6, 2, 3)]  # width, channels, side of a patch
ROWS, COLUMNS = 5, 7  # patches


def constants(width, channels, side):
    random = np.random.default_rng(width)
    filters = random.standard_normal((width, channels, side, side)) / (channels**0.5 * side)
    others = random.standard_normal((3, width))
    return [*(a.astype(np.float32) for a in (filters, *others)), random.permutation(ROWS * COLUMNS).astype(np.int32)]


def brute_force(x, filters, offsets, gain, bias, places):
    """In float64, patch by patch."""
    side = filters.shape[-1]
    corners = [(side * (place // COLUMNS), side * (place % COLUMNS)) for place in places]
    patches = np.stack([x[:, :, row : row + side, column : column + side] for row, column in corners], 1)
    y = np.einsum("btcij,ecij->bte", patches.astype(float), filters.astype(float)) + offsets
    return normalised(y, gain, bias)


def file_of(given):
    return one_node("PatchEmbedding", given, ranks=(4, 3))


def given_to(given, batch):
    _, channels, side, _ = given[0].shape
    return stream(batch, channels, ROWS * side, COLUMNS * side)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_compiled_operator_is_brute_force(case, library):
    given = constants(*case)
    file, wanted = file_of(given), brute_force(x := given_to(given, 9), *given)
    for threads in (1, 2):
        model = compiled(library, file, threads)
        for batch in (9, 1, 0):
            np.testing.assert_allclose(model(x[:batch]), wanted[:batch], atol=2e-4)
    x[1] = np.nan
    found = compiled(library, file)(x)
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-4)
    assert np.isnan(found[1]).all()
    if "bfloat16" in engine.float_types():
        x = in_bfloat16(given_to(given, 2))
        found = compiled(library, file, in_half=True)(x)
        np.testing.assert_allclose(found, brute_force(x, *given), rtol=2**-8, atol=2e-4)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_the_operator_in_torch_and_its_onnx_function_are_brute_force(case):
    given = constants(*case)
    wanted = brute_force(x := given_to(given, 2), *given)
    for found in without_library(patch_embedding, "PatchEmbedding", file_of(given), (x, *given)):
        np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_are_of_pictures_of_any_size_with_zeros_beyond_their_edges(case, library):
    given, side = constants(*case), case[2]
    x = given_to(given, 2)
    x[:, :, 1 - side :], x[..., 1 - side :] = 0, 0
    given.pop()
    wanted = brute_force(x, *given, np.arange(ROWS * COLUMNS)).reshape(2, ROWS, COLUMNS, -1)
    x = np.ascontiguousarray(x[:, :, : 1 - side, : 1 - side])
    file = one_node("PatchEmbedding", given, ranks=(4, 4))
    for batch in (2, 0):
        np.testing.assert_allclose(compiled(library, file, threads=2)(x[:batch]), wanted[:batch], atol=2e-4)
    for found in without_library(patch_embedding, "PatchEmbedding", file, (x, *given)):
        np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_pictures_of_another_size_are_refused(library):
    model = compiled(library, file_of(constants(*CASES[0])), threads=2)  # with one OpenVINO keeps the error
    for shape in ((1, 3, 20, 24), (1, 3, 22, 28), (1, 2, 20, 28)):
        with pytest.raises(RuntimeError, match="are not pictures of"):
            model(stream(*shape))


@pytest.mark.parametrize(
    "place, value, said",
    [
        (4, lambda old: old + 1, "must be within 0 and 34"),  # reads behind the picture
        (0, lambda old: old[:, :, :3], "its weights are"),
        (1, lambda old: old[:9], "and must have 96 values"),
        (2, lambda old: old.astype(np.float64), "must be a constant, not f64"),
    ],
)
def test_constants_that_do_not_fit_are_refused(place, value, said, library):
    given = constants(*CASES[0])
    given[place] = value(given[place])
    with pytest.raises(RuntimeError, match=said):
        compiled(library, file_of(given))
