"""Writes an ONNX function for each plugin's node into the file: engines without the plugin run the function."""

from collections.abc import Callable, Sequence
from functools import partial

import onnx

from swin_quant.backends.onnx.function_body import FunctionBody
from swin_quant.base.errors import UsageError
from swin_quant.operators.plugins import Node, Plugin

_END = 2**62
_FLOAT, _INT8 = 1, 3  # onnx.TensorProto's numbers
_MERGED = [0, 1, 3, 2, 4, 5]  # of [B, H / h, h, W / w, w, C]: the places of a window side by side, or back


def _roll(body: FunctionBody, x: str) -> str:
    dims = body.attributes["dims"]
    if other := next((call.attributes["dims"] for call in body.calls if call.attributes["dims"] != dims), None):
        raise UsageError(
            f"‹plugin› roll: this model rolls dimensions {dims} and {other}, and a function of ONNX joins along fixed "
            "ones: use ‹replace› roll"
        )
    shifts, shape = body.given("shifts", "INTS"), body("Shape", x)
    for place, dim in enumerate(dims):
        axis = body.whole(dim)
        shift, length = body.at(shifts, place), body("Slice", shape, axis, body.whole(dim + 1))
        cut = body("Mod", body("Neg", shift), length)
        head = body("Slice", x, cut, body.whole(_END), axis)
        x = body("Concat", head, body("Slice", x, body.whole(0), cut, axis), axis=dim)
    return x


class _Scales:
    """The attribute `scales` of a function, and rounding by one of them."""

    def __init__(self, body: FunctionBody) -> None:
        self.body, self.all = body, body.given("scales", "FLOATS")
        self.ends = body.number(-128.0), body.number(127.0)

    def at(self, place: int) -> str:
        return self.body("Gather", self.all, self.body.number(place))

    def levels(self, x: str, place: int) -> str:
        return self.body("Clip", self.body("Round", self.body("Div", x, self.at(place))), *self.ends)

    def rounded(self, x: str, place: int) -> str:
        return self.body("Mul", self.levels(x, place), self.at(place))


def _attention(body: FunctionBody, x: str, constant: str) -> str:
    scales = _Scales(body)
    is_rounded = body("Greater", body("Size", scales.all), body.number(4))
    parts = [lambda part, i=i: body("Mul", body("Cast", part, to=_FLOAT), scales.at(i)) for i in range(3)]
    x = _attended(body, x, parts, constant, lambda y: body("Where", is_rounded, scales.rounded(y, 3), y))
    return body("Cast", scales.levels(x, -1), to=_INT8)


def _attended(
    body: FunctionBody, x: str, parts: Sequence[Callable[[str], str]], constant: str, rounded: Callable[[str], str]
) -> str:
    """softmax(q k^T + constant) v [B, T, C]. x: q, k, v [B, T, 3C], made floats by `parts`; `rounded`: the softmax."""
    heads = body("Reshape", body.given("heads", "INT"), body.whole(1))
    batch, tokens, channels = (body.size(x, dimension) for dimension in range(3))
    rounds, length = (body.size(constant, dimension) for dimension in range(2))
    windows, any_number = body("Div", rounds, heads), body.whole(-1)
    depth = body("Div", channels, body("Mul", heads, body.whole(3)))
    six = body("Concat", any_number, windows, length, body.whole(3), heads, depth, axis=0)
    x = body("Transpose", body("Reshape", x, six), perm=[3, 0, 1, 4, 2, 5])
    x = body("Reshape", x, body("Concat", body.whole(3), any_number, rounds, length, depth, axis=0))
    q, k, v = (part(body("Gather", x, body.number(i))) for i, part in enumerate(parts))
    logits = body("Add", body("MatMul", q, body("Transpose", k, perm=[0, 1, 3, 2])), constant)
    shares = rounded(body("Softmax", logits, axis=-1))
    five = body("Concat", any_number, windows, heads, length, depth, axis=0)
    x = body("Transpose", body("Reshape", body("MatMul", shares, v), five), perm=[0, 1, 3, 2, 4])
    return body("Reshape", x, body("Concat", batch, tokens, body("Mul", heads, depth), axis=0))


def _attention_branch(body: FunctionBody, x: str, places: str, gain: str, offset: str, *constants: str) -> str:
    linears, tables, lengths = constants[:10], constants[10:13], constants[13:]
    x = body("Gather", x, places, axis=1)
    inner = body.normed(x, (gain, offset), lambda y: _inside_windows(body, y, linears, _biases(body, *tables), lengths))
    return body("Add", x, inner)


def _token_branch(body: FunctionBody, x: str, gain: str, offset: str, *constants: str) -> str:
    linears, own, parts = constants[:10], iter(constants[10:]), body.attributes.get("parts", "")
    if "bias" in parts:
        added = body("Gather", next(own), next(own), axis=1)
    else:
        heads, tokens = body("Reshape", body.given("heads", "INT"), body.whole(1)), body.size(x, 1)
        added = body("ConstantOfShape", body("Concat", heads, tokens, tokens, axis=0))
    norms = next(own) if "layer_norm" in parts else None
    table = next(own) if "rotary" in parts else None
    turned = partial(_turned, body, norms, table) if norms or table else str
    inner = body.normed(x, (gain, offset), lambda y: _inside_windows(body, y, linears, added, (), turned))
    return body("Add", x, inner)


def _turned(body: FunctionBody, norms: str | None, table: str | None, y: str) -> str:
    """q, k and v [B, T, 3C] with q and k of each head normalised, then rotated."""
    heads = body("Reshape", body.given("heads", "INT"), body.whole(1))
    x = body("Reshape", y, body("Concat", body.whole(0, 0, 3), heads, body.whole(-1), axis=0))
    parts = [body("Gather", x, body.number(i), axis=2) for i in range(3)]  # [B, T, heads, depth]
    for i, part in enumerate(parts[:2]):
        if norms:
            gain, offset = (body("Gather", norms, body.number(2 * i + row)) for row in range(2))
            part = body.norm(part, gain, offset)
        if table:
            own, others = (body("Unsqueeze", body("Gather", table, body.number(i)), body.whole(1)) for i in range(2))
            half, last = body("Div", body.size(table, 2), body.whole(2)), body.whole(3)
            back = body("Slice", part, half, body.whole(_END), last)
            other = body("Concat", back, body("Slice", part, body.whole(0), half, last), axis=3)
            part = body("Add", body("Mul", part, own), body("Mul", other, others))
        parts[i] = part
    stacked = body("Concat", *(body("Unsqueeze", part, body.whole(2)) for part in parts), axis=2)
    return body("Reshape", stacked, body("Shape", y))


def _biases(body: FunctionBody, table: str, index: str, regions: str) -> str:
    """What logits have added [nW heads, L, L]: position biases, of which `index` has one for two tokens, and a mask."""
    regions = body("Cast", regions, to=_FLOAT)
    own, seen = (body("Unsqueeze", regions, body.whole(1, axis)) for axis in (3, 2))
    mask = body("Where", body("Equal", own, seen), *(body.number(value) for value in (0.0, -100.0)))
    length = body.size(index, 0)
    constant = body("Add", body("Gather", table, index, axis=1), mask)
    return body("Reshape", constant, body("Concat", body.whole(-1), length, length, axis=0))


def _inside_windows(
    body: FunctionBody,
    y: str,
    linears: Sequence[str],
    constant: str,
    lengths: Sequence[str],
    turned: Callable[[str], str] = str,
) -> str:
    """proj(attention(qkv(y))) for tokens [B, T, C] window by window. `turned`: changes the result of qkv."""
    scales = _Scales(body)
    y = body.linear(y, *linears[:5])
    y = turned(_normalize_lengths(body, y, *lengths) if lengths else y)
    is_rounded = len(body.attributes["scales"]) > 3
    parts = [lambda part, i=i: scales.rounded(part, i) for i in range(3)]
    y = _attended(body, y, parts, constant, lambda shares: scales.rounded(shares, 3) if is_rounded else shares)
    return body.linear(y, *linears[5:])


def _normalize_lengths(body: FunctionBody, y: str, lengths: str) -> str:
    """q, k and v [B, T, 3C] with each head's q normalised to `lengths` [heads], and its k to 1."""
    lengths = body("Concat", lengths, body("Div", lengths, lengths), axis=0)
    channels = body("Slice", body("Shape", y), body.whole(2), body.whole(3))
    qk_channels = body("Mul", body("Div", channels, body.whole(3)), body.whole(2))
    qk = body("Slice", y, body.whole(0), qk_channels, body.whole(2))
    v = body("Slice", y, qk_channels, channels, body.whole(2))
    shape = body("Concat", body.whole(0, 0), body("Shape", lengths), body.whole(-1), axis=0)
    heads = body("Reshape", qk, shape)
    size = body("Sqrt", body("ReduceSum", body("Mul", heads, heads), body.whole(-1), keepdims=1))
    size = body("Max", size, body.number(1e-12))
    heads = body("Mul", heads, body("Div", body("Unsqueeze", lengths, body.whole(1)), size))
    return body("Concat", body("Reshape", heads, body("Shape", qk)), v, axis=2)


class _Cut:
    """The cut of maps like `x` [B, H, W, C] into the windows of a function's attributes (`models.maps.Cut`)."""

    def __init__(self, body: FunctionBody, x: str) -> None:
        self.body, self.pad_first = body, body.attributes["pad_first"]
        shape = body("Shape", x)
        self.batch, height, width, self.channels = (body.at(shape, place) for place in range(4))
        self.sizes = height, width
        pairs = (body.given(name, "INTS") for name in ("window", "shift"))
        self.window, self.shift = ([body.at(pair, place) for place in range(2)] for pair in pairs)
        self.whole = [
            body("Mul", body("Div", body("Add", size, body("Sub", side, body.whole(1))), side), side)
            for size, side in zip(self.sizes, self.window, strict=True)
        ]
        self.counts = [body("Div", size, side) for size, side in zip(self.whole, self.window, strict=True)]

    def _padded(self, x: str) -> str:
        none = self.body.whole(0)
        below, right = (self.body("Sub", *both) for both in zip(self.whole, self.sizes, strict=True))
        return self.body("Pad", x, self.body("Concat", none, none, none, none, none, below, right, none, axis=0))

    def _rolled(self, x: str, back: bool) -> str:
        body, sizes = self.body, self.whole if self.pad_first else self.sizes
        for axis, (size, by) in enumerate(zip(sizes, self.shift, strict=True), 1):
            at, along = body("Mod", body("Neg", by) if back else by, size), body.whole(axis)
            behind = body("Slice", x, at, body.whole(_END), along)
            x = body("Concat", behind, body("Slice", x, body.whole(0), at, along), axis=axis)
        return x

    def _blocks(self, x: str, channels: str) -> str:
        (rows, columns), (high, wide), body = self.counts, self.window, self.body
        six = body("Concat", body.whole(-1), rows, high, columns, wide, channels, axis=0)
        return body("Transpose", body("Reshape", x, six), perm=_MERGED)

    def tokens(self, x: str) -> str:
        """[B, H, W, C] -> [B, T, C], window by window."""
        x = self._rolled(self._padded(x), False) if self.pad_first else self._padded(self._rolled(x, False))
        shape = self.body("Concat", self.batch, self.body("Mul", *self.whole), self.channels, axis=0)
        return self.body("Reshape", self._blocks(x, self.channels), shape)

    def map(self, tokens: str) -> str:
        """The inverse of `tokens`."""
        (rows, columns), (high, wide), body = self.counts, self.window, self.body
        six = body("Concat", self.batch, rows, columns, high, wide, self.channels, axis=0)
        x = body("Transpose", body("Reshape", tokens, six), perm=_MERGED)
        x = body("Reshape", x, body("Concat", self.batch, *self.whole, self.channels, axis=0))
        inside = body.whole(0, 0), body("Concat", *self.sizes, axis=0), body.whole(1, 2)
        if self.pad_first:
            return body("Slice", self._rolled(x, True), *inside)
        return self._rolled(body("Slice", x, *inside), True)

    def regions(self) -> str:
        """[nW, L]: tokens of one number see each other."""
        body = self.body
        bands = []
        for size, side, by in zip(self.whole, self.window, self.shift, strict=True):
            scalar = body("Squeeze", size, body.whole(0))
            places = body("Range", body.number(0), scalar, body.number(1))
            parts = [body("GreaterOrEqual", places, body("Sub", size, end)) for end in (side, by)]
            bands.append(body("Add", *(body("Cast", part, to=_FLOAT) for part in parts)))
        down = body("Mul", body("Unsqueeze", bands[0], body.whole(1)), body.number(3.0))
        numbers = body("Add", down, body("Unsqueeze", bands[1], body.whole(0)))
        windows = self._blocks(numbers, body.whole(1))
        sizes = [body("Mul", *both) for both in (self.counts, self.window)]
        return body("Reshape", windows, body("Concat", *sizes, axis=0))


def _map_branch(body: FunctionBody, x: str, gain: str, offset: str, *constants: str) -> str:
    linears, (table, index, *lengths) = constants[:10], constants[10:]
    cut = _Cut(body, x)

    def inner(y: str) -> str:
        tokens, regions = cut.tokens(y), cut.regions()
        return cut.map(_inside_windows(body, tokens, linears, _biases(body, table, index, regions), lengths))

    return body("Add", x, body.normed(x, (gain, offset), inner))


def _mlp(body: FunctionBody, x: str, gain: str, offset: str, *linears: str) -> str:
    name = body.attributes.get("activation", "gelu")
    wide, size = body.calls[0].inputs[5].shape[1], body.calls[0].inputs[10].shape[0]

    def inner(y: str) -> str:
        y = body.linear(y, *linears[:5])
        if wide == size:
            return body.linear(body.activation(y, name), *linears[5:])
        half = body.size(linears[7], 0)
        parts = [body("Slice", y, *ends, body.whole(-1)) for ends in ((body.whole(0), half), (half, body.whole(_END)))]
        return body.linear(body("Mul", body.activation(parts[0], name), parts[1]), *linears[5:])

    return body("Add", x, body.normed(x, (gain, offset), inner))


def _patch_merging(body: FunctionBody, x: str, gain: str, offset: str, *constants: str) -> str:
    linear, places = constants[:5], constants[5:]
    wide = body.size(linear[2], 0)
    if places:
        results = body("Div", body("Shape", *places), body.whole(4))
        y = body("Reshape", body("Gather", x, *places, axis=1), body("Concat", body.whole(0), results, wide, axis=0))
    else:
        x, rows, columns = _padded(body, x, 1, 2)
        two = body.whole(2)
        six = body("Concat", body.whole(0), rows, two, columns, two, body.whole(-1), axis=0)
        four = body("Transpose", body("Reshape", x, six), perm=[0, 1, 3, 4, 2, 5])
        y = body("Reshape", four, body("Concat", body.whole(0), rows, columns, wide, axis=0))
    return body.normed(y, (gain, offset), lambda y: body.linear(y, *linear))


def _padded(body: FunctionBody, x: str, first: int, side: int) -> tuple[str, str, str]:
    """x of rank 4, its dimensions `first` and the next padded to multiples of `side`; how often these hold it."""
    shape, counts, missing = body("Shape", x), [], []
    for axis in (first, first + 1):
        size = body.at(shape, axis)
        counts.append(body("Div", body("Add", size, body.whole(side - 1)), body.whole(side)))
        missing.append(body("Sub", body("Mul", counts[-1], body.whole(side)), size))
    behind = [body.whole(*[0] * (2 - first))] if first < 2 else []
    pads = body("Concat", body.whole(*[0] * (4 + first)), *missing, *behind, axis=0)
    return body("Pad", x, pads), counts[0], counts[1]


def _patch_embedding(
    body: FunctionBody, x: str, filters: str, offsets: str, gain: str, offset: str, *places: str
) -> str:
    sides = list(body.calls[0].inputs[1].shape[2:])  # the patch: strides are attributes, which no tensor gives
    x = x if places else _padded(body, x, 2, sides[0])[0]
    y = body("Conv", x, filters, offsets, strides=sides, kernel_shape=sides)
    if places:
        y = body("Transpose", body("Reshape", y, body.whole(0, 0, -1)), perm=[0, 2, 1])
        y = body("Gather", y, *places, axis=1)
    else:
        y = body("Transpose", y, perm=[0, 2, 3, 1])
    return body.norm(y, gain, offset)


_BODIES: dict[str, Callable[..., str]] = {
    "roll": _roll,
    "relu": lambda body, x: body("Relu", x),
    "layer_norm": lambda body, *inputs: body(
        "LayerNormalization", *inputs, refer={"axis": ("axis", "INT"), "epsilon": ("epsilon", "FLOAT")}
    ),
    "attention": _attention,
    "attention_branch": _attention_branch,
    "map_branch": _map_branch,
    "token_branch": _token_branch,
    "mlp": _mlp,
    "patch_merging": _patch_merging,
    "patch_embedding": _patch_embedding,
}


def build_function(plugin: Plugin, calls: Sequence[Node], opset: int) -> onnx.FunctionProto:
    """The function that all nodes of a plugin call. UsageError if one function cannot stand for all of them."""
    body = FunctionBody(opset, calls)
    inputs = [f"x{place}" for place in range(len(calls[0].inputs))]
    output = _BODIES[plugin.operator](body, *inputs)
    opsets = [onnx.helper.make_opsetid("", opset)]
    doc = f"{plugin.operator}: what it computes, for engines that have no plugin for it"
    return onnx.helper.make_function(
        plugin.domain, plugin.name, inputs, [output], body.nodes, opsets, list(body.attributes), doc_string=doc
    )


def add_functions(proto: onnx.ModelProto, nodes: Sequence[tuple[Plugin, Node]], opset: int) -> None:
    """Add a function for each plugin whose nodes are still in the graph of `proto`, in place."""
    used = {(node.domain, node.op_type) for node in proto.graph.node}
    for plugin in dict.fromkeys(plugin for plugin, _ in nodes):
        if (plugin.domain, plugin.name) in used:
            proto.functions.append(build_function(plugin, [node for one, node in nodes if one == plugin], opset))
