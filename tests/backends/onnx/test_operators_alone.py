"""Each compiled operator alone in a file is brute force: on loops and vectors, and as its ONNX function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product as pairs
from typing import Any

import numpy as np
import pytest
from nightly import share
from operator_nodes import (
    ACTIVATIONS,
    assert_near,
    attended,
    compiled,
    in_bfloat16,
    linear,
    mlp,
    normalised,
    one_node,
    product,
    stream,
    token_branch,
    without_library,
)

from swin_quant.backends.openvino import engine
from swin_quant.models.maps import offset_index

SCALES = [0.03, 0.04, 0.02]  # of q, k and v; with a fourth the softmax is rounded
OF_RESULT = 0.012


@dataclass
class Given:
    """A node: its operator, its constants and attributes, and brute force in float64.

    `shapes`: of its input, the batch first. `base`: what the result adds to. `limits`: of `assert_near`, for the
    compiled operator, whose kernel of attention rounds exponentials to 8 bits, and for the others.
    """

    operator: str
    constants: list[np.ndarray]
    brute_force: Callable[[np.ndarray], np.ndarray]
    shapes: list[tuple[int, ...]]
    attributes: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[int, int] = (3, 3)
    base: Callable[[np.ndarray], Any] = lambda x: 0.0
    limits: tuple[float, float] = (1e-6, 1e-6)

    def file(self):
        return one_node(self.operator, self.constants, self.ranks, **self.attributes)


def floats(random, *shape):
    return random.standard_normal(shape).astype(np.float32)


def given_map(heads, depth, window, shift, pad_first, is_cosine, zero, norm_last=False):
    """Attention's branch on maps of any size; the mask is cut out of a picture of nine regions."""
    random, channels, (high, wide) = np.random.default_rng(0), heads * depth, window
    scales = [*SCALES, 1 / 127] if norm_last else SCALES
    table, index = floats(random, heads, (2 * high - 1) * (2 * wide - 1)), offset_index(window).int().numpy()
    lengths = [random.uniform(2, 6, heads).astype("f")] if is_cosine else []
    norm = floats(random, 2, channels)
    first = linear(random, channels, 3 * channels, 0.03, zero)
    last = linear(random, channels, channels, OF_RESULT, None)

    def brute_force(x):
        batch, height, width, _ = x.shape

        def rolled(array):
            missing = [(0, 0), (0, -height % high), (0, -width % wide), (0, 0)]
            steps = [lambda y: np.pad(y, missing), lambda y: np.roll(y, [-by for by in shift], (1, 2))]
            for step in steps if pad_first else steps[::-1]:
                array = step(array)
            return array

        x = x.astype(float)
        y = rolled(x if norm_last else normalised(x, *norm))
        tokens = rolled(1 + np.arange(height * width).reshape(1, height, width, 1))[0, ..., 0]  # 0: padding
        regions, sizes = np.zeros(tokens.shape), zip(tokens.shape, window, shift, strict=True)
        rows, columns = ([0, size - side, size - by, size] for size, side, by in sizes)
        for number, (row, column) in enumerate(pairs(range(3), repeat=2)):
            regions[rows[row] : rows[row + 1], columns[column] : columns[column + 1]] = number
        result = np.full((batch, height * width, channels), np.nan)
        for top, left in pairs(range(0, tokens.shape[0], high), range(0, tokens.shape[1], wide)):
            at = slice(top, top + high), slice(left, left + wide)
            own = product(y[:, at[0], at[1]].reshape(batch, -1, channels), *first)
            qkv = own.reshape(batch, -1, 3, heads, depth).transpose(2, 0, 3, 1, 4)
            seen = regions[at].flatten() if any(shift) else np.zeros(high * wide)
            added = table.astype(float)[:, index] - 100.0 * (seen[:, None] != seen)
            own = attended(*qkv, added, lengths, scales).transpose(0, 2, 1, 3)
            own = product(own.reshape(batch, -1, channels), *last)
            there = tokens[at].flatten()
            result[:, there[there > 0] - 1] = own[:, there > 0]
        result = result.reshape(x.shape)
        return x + (normalised(result, *norm) if norm_last else result)

    how = {"heads": heads, "scales": scales, "norm_last": int(norm_last)}
    how |= {"window": list(window), "shift": list(shift), "pad_first": int(pad_first)}
    sizes = [(15, 9), (7, 21), (1, 1), (4, 30)]  # padded twice; whole windows of 7; one token; windows that are higher
    shapes, constants = [(2, *size, channels) for size in sizes], [*norm, *first, *last, table, index, *lengths]
    return Given("map_branch", constants, brute_force, shapes, how, (4, 4), lambda x: x, (1e-4, 1e-5))


def given_branch(heads, depth, window, shift, is_cosine, windows=2, zero=None, norm_last=False):
    """The same on tokens of `windows` squared whole windows, window by window; int8 without a zero point."""
    on_map = given_map(heads, depth, (window,) * 2, (shift,) * 2, False, is_cosine, zero, norm_last)
    side, width = windows * window, heads * depth

    def by_windows(array):
        array = np.roll(array.reshape(side, side), (-shift, -shift), (0, 1)).reshape(windows, window, windows, window)
        return array.transpose(0, 2, 1, 3).reshape(windows**2, window**2)

    ends = (np.arange(side) >= shift).astype(np.uint8)  # what is rolled round to the other end sees nothing else
    regions = by_windows(2 * ends[:, None] + ends) if shift else np.zeros((1, window**2), np.uint8)
    places = by_windows(np.arange(side**2)).flatten().astype(np.int32)
    how = {name: on_map.attributes[name] for name in ("heads", "scales", "norm_last")}
    constants = [places, *on_map.constants[:14], regions, *on_map.constants[14:]]

    def brute_force(x):
        return on_map.brute_force(x.reshape(len(x), side, side, width)).reshape(x.shape)[:, places]

    return Given("attention_branch", constants, brute_force, [(3, side**2, width)], how,
                 base=lambda x: x[:, places], limits=on_map.limits)  # fmt: skip


def given_tokens(heads, depth, tokens, zero=None, parts="", norm_last=False):
    """Attention's branch among all tokens; some position biases hide a key."""
    random, width = np.random.default_rng(0), heads * depth
    scales = [*SCALES, 1 / 127] if norm_last else SCALES
    norm = floats(random, 2, width)
    first, last = linear(random, width, 3 * width, 0.03, zero), linear(random, width, width, OF_RESULT, None)
    table, index = floats(random, heads, 9), random.integers(0, 9, (tokens, tokens), np.int32)
    table[:, 0], index[np.diag_indices(tokens)] = -np.inf, 1
    norms = random.uniform(0.5, 1.5, (4, depth)).astype(np.float32)
    turns = random.uniform(-1, 1, (2, tokens, depth)).astype(np.float32)
    own = {"bias": [table, index], "layer_norm": [norms], "rotary": [turns]}

    how = {"heads": heads, "scales": scales, "norm_last": int(norm_last)}
    how |= {"parts": parts} if parts else {}  # which older files do not have
    constants = [*norm, *first, *last, *(one for word in parts.split() for one in own[word])]
    counts = [tokens] if "bias" in parts or "rotary" in parts else [tokens, tokens + 3]  # without positions any will do
    shapes = [(2, count, width) for count in counts]
    return Given("token_branch", constants, lambda x: token_branch(x, *constants, **how), shapes, how,
                 base=lambda x: x, limits=(1e-4, 1e-5))  # fmt: skip


def given_mlp(width, hidden, zero=None, inner_zero=9, gated=False, norm_last=False, activation="gelu"):
    """An MLP's branch, `gated` by the second half of its first linear; int8 where a zero point is None."""
    random = np.random.default_rng(0)
    norm = floats(random, 2, width)
    first = linear(random, width, hidden * (1 + gated), 0.03, zero)
    last = linear(random, hidden, width, 0.015, inner_zero)

    # Less than a row of the loops, tiles that are not full, none
    shapes = [(2, size, width) for size in (1, 7, 101, 0)]
    how = {"norm_last": int(norm_last)} | ({"activation": activation} if activation != "gelu" else {})
    constants = [*norm, *first, *last]
    return Given("mlp", constants, lambda x: mlp(x, *constants, **how), shapes, how, base=lambda x: x)


def given_merging(channels, norm_last, zero, size=None):
    """Patch merging of tokens in any order, or with zeros around a map of this size."""
    random, tokens = np.random.default_rng(channels), 4 * 25
    norm = floats(random, 2, (2 if norm_last else 4) * channels)
    weights = linear(random, 4 * channels, 2 * channels, 0.03, zero)
    order = random.permutation(tokens).astype(np.int32)

    def brute_force(x, places=order):
        y = np.concatenate([x.astype(float)[:, places[i::4]] for i in range(4)], -1)
        y = product(y if norm_last else normalised(y, *norm), *weights)
        return normalised(y, *norm) if norm_last else y

    def on_map(x):
        batch, height, width, _ = x.shape
        rows, columns = -(-height // 2), -(-width // 2)
        whole = np.zeros((batch, 2 * rows, 2 * columns, channels))
        whole[:, :height, :width] = x
        places = np.arange(4 * rows * columns).reshape(rows, 2, columns, 2).transpose(0, 2, 3, 1).ravel()
        return brute_force(whole.reshape(batch, -1, channels), places).reshape(batch, rows, columns, -1)

    how, constants = {"norm_last": int(norm_last)}, [*norm, *weights]
    if size:
        return Given("patch_merging", constants, on_map, [(3, *size, channels)], how, (4, 4))
    return Given("patch_merging", [*constants, order], brute_force, [(9, tokens, channels)], how)


def given_embedding(width, channels, side, on_map=False):
    """Patch embedding of 5 x 7 patches in any order, or row by row, where the last are cut off."""
    random, (rows, columns) = np.random.default_rng(width), (5, 7)
    filters = (random.standard_normal((width, channels, side, side)) / (channels**0.5 * side)).astype(np.float32)
    others = floats(random, 3, width)
    order = random.permutation(rows * columns).astype(np.int32)
    missing = side - 1 if on_map else 0

    def brute_force(x):
        x = np.pad(x, [(0, 0), (0, 0), (0, missing), (0, missing)])
        corners = [divmod(place, columns) for place in (range(rows * columns) if on_map else order)]
        patches = [x[:, :, side * a : side * (a + 1), side * b : side * (b + 1)] for a, b in corners]
        y = np.einsum("btcij,ecij->bte", np.stack(patches, 1).astype(float), filters.astype(float)) + others[0]
        y = normalised(y, *others[1:])
        return y.reshape(len(x), rows, columns, width) if on_map else y

    constants = [filters, *others] if on_map else [filters, *others, order]
    shapes = [(9, channels, rows * side - missing, columns * side - missing)]
    ranks, limits = (4, 4 if on_map else 3), (1e-8, 1e-8)
    return Given("patch_embedding", constants, brute_force, shapes, ranks=ranks, limits=limits)


BRANCHES = {  # heads, depth, window, shift, cosine, windows a side, zero point
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
MAPS = {  # heads, depth, window, shift, padded first, cosine, zero point
    "map, 7, shifted as in timm": (3, 32, (7, 7), (3, 3), False, False, None),
    "map, 7, shifted as in detection": (3, 32, (7, 7), (3, 3), True, False, 131),
    "map, 8, cosine": (2, 32, (8, 8), (4, 4), True, True, None),
    "map, 5 x 12, one side shifted": (1, 32, (5, 12), (0, 6), False, False, None),
    "map, 16, cosine, not shifted": (2, 32, (16, 16), (0, 0), False, True, 120),
    "map, heads of no fast loops": (2, 8, (3, 2), (1, 1), False, True, 7),
    "map, the same, padded first": (2, 8, (3, 2), (1, 1), True, False, None),
}
MLPS = {  # width, hidden, zero points, whether it has gates
    "mlp": (96, 384, None, 9),
    "mlp, uint8 in, int8 inside, one panel of 32 columns": (32, 64, 131, None),
    "mlp, int8": (160, 128, None, None),
    "mlp of no fast widths": (10, 20, None, 9),
    "gated mlp, uint8 in": (96, 192, 131, 9, True),
    "gated mlp, int8, one panel of 32 columns": (32, 64, None, None, True),
    "gated mlp of no fast widths": (10, 20, None, 9, True),
}
MERGING = [(32, False, None), (64, True, 131), (6, False, 131), (6, True, None)]  # channels, norm last, zero point
EMBEDDING = [(96, 3, 4), (64, 1, 5), (32, 4, 8), (20, 3, 4), (6, 2, 3)]  # width, channels, side of a patch
TOKENS = {  # heads, depth, tokens, zero point, parts
    "DeiT-tiny": (3, 64, 197, 131),
    "one token among all": (2, 64, 1),
    "the most tokens": (1, 64, 1024),
    "heads of 32 channels": (3, 32, 50),
    "more tokens than the fast loops take": (1, 64, 1025),
    "tokens in heads of no fast loops": (2, 24, 17),
    "BEiT": (3, 64, 197, 131, "bias"),
    "DINOv3": (3, 64, 201, 131, "rotary"),
    "normal heads of 64 channels": (2, 64, 50, None, "layer_norm"),
    "all parts in heads of 32 channels": (4, 32, 50, None, "bias layer_norm rotary"),
    "all parts in no fast loops": (2, 24, 17, None, "bias layer_norm rotary"),
}
SLOW_TOKENS = ("the most tokens", "more tokens than the fast loops take")
QUICK_TOKENS = [name for name in TOKENS if name not in SLOW_TOKENS]
GIVEN: dict[str, Callable[..., Given]] = {
    **{name: partial(given_branch, *case) for name, case in BRANCHES.items()},
    **{name: partial(given_map, *case) for name, case in MAPS.items()},
    **{name: partial(given_mlp, *case) for name, case in MLPS.items()},
    **{name: partial(given_tokens, *case) for name, case in TOKENS.items()},
}
BOTH_NORMS = [*GIVEN]
GIVEN |= {
    **{f"{one} of {name}": partial(given_mlp, *MLPS[name], activation=one)
       for name in ("mlp", "mlp of no fast widths", "gated mlp, uint8 in") for one in ACTIVATIONS},
    **{f"merging {case}": partial(given_merging, *case) for case in MERGING},
    **{f"merging {case} of a map {size}": partial(given_merging, *case, size)
       for case in MERGING for size in ((6, 4), (5, 7), (1, 1))},
    **{f"embedding {case}{' to a map' * on_map}": partial(given_embedding, *case, on_map)
       for case in EMBEDDING for on_map in (False, True)},
}  # fmt: skip
SHARED = [name for name in GIVEN if name not in TOKENS]


def both_norms(name):
    """The node, with the norm last, too, where that is a choice."""
    return [GIVEN[name](**how) for how in ({}, {"norm_last": True})[: 1 + (name in BOTH_NORMS)]]


@pytest.mark.parametrize(
    "name",
    [
        *share(SHARED, 2),
        *(pytest.param(name, marks=[pytest.mark.nightly] * name.startswith("more")) for name in TOKENS),
    ],
)
def test_the_compiled_operator_is_brute_force_but_for_ties(name, library):
    """For any batch, with any number of threads; NaN stays in its picture."""
    for given in both_norms(name):
        models = [compiled(library, given.file(), threads) for threads in (1, 2)]
        for shape in given.shapes:
            wanted = given.brute_force(x := stream(*shape))
            for model, batch in pairs(models, (len(x), 1, 0)):
                assert_near(model(x[:batch]), wanted[:batch], given.base(x[:batch]), given.limits[0])
            x[1] = np.nan
            found = models[0](x)
            assert np.isfinite(np.delete(found, 1, 0)).all()
            if found.size and given.operator != "patch_merging":  # levels of NaN are numbers
                assert np.isnan(found[1]).any()
        if given.operator == "map_branch":
            empty = np.zeros((2, 0, 3, shape[-1]), np.float32)
            assert models[0](empty).shape == empty.shape


@pytest.mark.parametrize("name", share([name for name in GIVEN if name.startswith(("merging", "embedding"))], 3))
def test_a_compiled_operator_reads_and_writes_bfloat16(name, library):
    if "bfloat16" not in engine.float_types():
        pytest.skip("no bfloat16")
    given = GIVEN[name]()
    x = in_bfloat16(stream(*given.shapes[0]))
    found = compiled(library, given.file(), in_half=True)(x)
    assert_near(found, in_bfloat16(given.brute_force(x)), limit=2e-5)  # between two numbers of bfloat16


@pytest.mark.parametrize("name", [*share(SHARED, 4), *TOKENS])
def test_the_onnx_function_is_brute_force(name):
    for given in both_norms(name):
        for shape in given.shapes:
            x = stream(2, *shape[1:])
            wanted, arrays = given.brute_force(x), (x, *given.constants)
            for found in without_library(given.operator, given.file(), arrays, **given.attributes):
                assert_near(found, wanted, given.base(x), given.limits[1])


SMALL = partial(given_branch, 2, 8, 3, 1, False)
PATCHES = partial(given_embedding, *EMBEDDING[0])
SEVEN = GIVEN["map, 7, shifted as in timm"]


@pytest.mark.parametrize(
    ("make", "place", "value", "said"),
    [
        (SMALL, 0, lambda old: old + 1, "must be within 0 and 35"),  # reads behind the picture
        (SMALL, 14, lambda old: old - 25, "must be within 0 and 24"),
        (SMALL, 13, lambda old: old.astype(np.float64), "must be a constant, not f64"),
        (SMALL, 9, lambda old: np.int8(3), "cannot have a zero point"),
        (SMALL, 15, lambda old: old[:, :4], "are not windows of 9 tokens"),
        (SMALL, 5, lambda old: old[:, :9], "and must have"),
        (SMALL, 10, lambda old: old[None], "its weights are"),
        (PATCHES, 4, lambda old: old + 1, "must be within 0 and 34"),
        (PATCHES, 0, lambda old: old[:, :, :3], "its weights are"),
        (PATCHES, 1, lambda old: old[:9], "and must have 96 values"),
        (PATCHES, 2, lambda old: old.astype(np.float64), "must be a constant, not f64"),
        (SEVEN, "window", lambda old: [7, 8], "wants a window of 49 tokens"),
        (SEVEN, "window", lambda old: [-7, -7], "wants a window of 49 tokens"),
        (SEVEN, "shift", lambda old: [0, 7], "a shift within it"),
        (SEVEN, "heads", lambda old: 5, "wants heads that divide 96"),
        (GIVEN["silu of mlp"], "activation", lambda old: "mish", "Mlp: has no activation mish"),
    ],
)
def test_constants_and_attributes_that_do_not_fit_are_refused(make, place, value, said, library):
    given = make()
    held = given.constants if isinstance(place, int) else given.attributes
    held[place] = value(held[place])
    with pytest.raises(RuntimeError, match=said):
        compiled(library, given.file())


def test_pictures_of_another_size_are_refused(library):
    model = compiled(library, PATCHES().file(), threads=2)  # with one OpenVINO keeps the error
    for shape in ((1, 3, 20, 24), (1, 3, 22, 28), (1, 2, 20, 28)):
        with pytest.raises(RuntimeError, match="are not pictures of"):
            model(stream(*shape))
    for name in ("BEiT", "DINOv3"):
        heads, depth, tokens, *_ = TOKENS[name]
        with pytest.raises(RuntimeError, match=f"are not pictures of {tokens} tokens"):
            compiled(library, GIVEN[name]().file(), threads=2)(stream(1, tokens + 3, heads * depth))
