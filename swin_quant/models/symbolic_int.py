"""Keep a batch symbolic through `int(size / number)`, as in Microsoft's `window_reverse`, `int(size)`, `float(size)`
and `len(x)`.

`B = int(windows.shape[0] / (H * W / window / window))` asks for a number, so torch.export fixes the batch at that of
the example. Such a module is exported again, while `int` in its source files gives the exact quotient of a symbolic
size, and `float` and `len` a symbolic number. Any other module keeps Python's own, which it may give as a dtype.
"""

import builtins
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils._sympy import functions


class _Kind(type):
    """`isinstance` and `issubclass` in the module's files mean Python's own class, and so do its methods."""

    own: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.own)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, cls.own)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.own, name)


class _Int(metaclass=_Kind):
    """`int`, which keeps a symbolic quotient without a remainder."""

    own = builtins.int

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.SymInt):
            return args[0]
        if len(args) == 1 and isinstance(args[0], torch.SymFloat) and (exact := _exact(args[0])) is not None:
            return exact
        return builtins.int(*args, **options)


class _Float(metaclass=_Kind):
    """`float`, which keeps a symbolic number."""

    own = builtins.float

    def __new__(cls, *args: Any) -> Any:
        if args and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return torch.sym_float(args[0])
        return builtins.float(*args)


def _len(given: Any) -> Any:
    """`len`, which keeps the symbolic size of a tensor."""
    return given.shape[0] if isinstance(given, Tensor) and given.dim() else builtins.len(given)


def _exact(number: torch.SymFloat) -> Any:
    """The integer that `number` is for all values of its symbols; None where that cannot be told."""
    node, found = number.node, _find_polynomial(_without_quotients(number.node.expr))
    return None if found is None else node.shape_env.create_symintnode(found, hint=builtins.int(node.hint))


def remove_roundings(number: torch.SymInt) -> Any:
    """The expression of `number`, without roundings of quotients that have no remainder, as `math.floor` makes them."""
    found = number.node.expr
    if not found.has(*_ROUNDINGS):
        return found
    found = _without_quotients(found)
    for rounding in _ROUNDINGS:

        def exact(given: Any, rounding: Any = rounding) -> Any:
            polynomial = _find_polynomial(given)
            return rounding(given) if polynomial is None else polynomial

        found = found.replace(rounding, exact)
    return found


def _without_quotients(expression: Any) -> Any:
    """An expression with divisions in the place of torch's functions."""
    for function, plain in _QUOTIENTS.items():
        expression = expression.replace(function, plain)
    return expression


def _find_polynomial(expression: Any) -> Any:
    """An expression as a polynomial of whole coefficients; None if it is none."""
    found = sympy.nsimplify(sympy.simplify(expression), rational=True)
    symbols = sorted(found.free_symbols, key=str)
    if not symbols or not found.is_polynomial(*symbols):
        return None
    return found if all(factor.is_Integer for factor in sympy.Poly(found, *symbols).coeffs()) else None


_ROUNDINGS = (functions.FloorToInt, functions.CeilToInt, functions.TruncToInt, functions.RoundToInt)
_QUOTIENTS = {
    **dict.fromkeys((functions.FloatTrueDiv, functions.IntTrueDiv), lambda a, b: a / b),
    functions.ToFloat: lambda a: a,
}
_SYMBOLIC: dict[str, Any] = {"int": _Int, "float": _Float, "len": _len}


def export_program(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], dims: Sequence[int]) -> Any:
    """torch.export's program of `module(*args, **options)`, whose tensors may have any extent in `dims`, if it can."""
    tensors = [*args, *options.values()]
    shapes: Any = torch.export.ShapesCollection()
    for tensor in tensors:
        shapes[tensor] = dict.fromkeys(dims, torch.export.Dim.AUTO)

    def program() -> Any:
        # Nobody reads the lines of Python behind each operator, which take a tenth of the time
        with patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
            return torch.export.export(module, args, options, dynamic_shapes=shapes, strict=False)

    first = program()
    pictures = [node.meta["val"] for node in first.graph.nodes if node.name in first.graph_signature.user_inputs]
    if not any(is_concrete_int(one.shape[dim]) for one in pictures for dim in dims):
        return first
    with _symbolic_numbers(module):
        try:
            return program()
        except Exception:  # a forward pass may raise anything on symbolic numbers
            return first


@contextmanager
def _symbolic_numbers(module: nn.Module) -> Iterator[None]:
    """Inside the context, `int`, `float` and `len` are symbolic in the files of `module`'s parts and functions they
    import."""
    files = {type(part).__module__ for part in module.modules()}
    scopes = [vars(sys.modules[name]) for name in files if name in sys.modules and not name.startswith("torch.")]
    imported = [value for scope in scopes for value in scope.values() if isinstance(value, FunctionType)]
    scopes += [one.__globals__ for one in imported if not one.__module__.startswith("torch.")]
    patched = [
        (scope, name) for scope in {id(one): one for one in scopes}.values() for name in _SYMBOLIC if name not in scope
    ]
    for scope, name in patched:
        scope[name] = _SYMBOLIC[name]
    try:
        yield
    finally:
        for scope, name in patched:
            del scope[name]
