"""Keep a batch symbolic through `int(size / number)`, as in Microsoft's `window_reverse`, `int(size)` and `len(x)`.

`B = int(windows.shape[0] / (H * W / window / window))` asks for a number, so torch.export would fix the batch at that
of the example. While a module is captured, `int` in its source files gives the exact quotient of a symbolic size, and
`len` a symbolic size.
"""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat


class _Kind(type):
    """`isinstance` and `issubclass` in the module's files mean Python's own `int`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, builtins.int)


class _Int(metaclass=_Kind):
    """`int`, which keeps a symbolic quotient without a remainder."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], torch.SymInt):
            return args[0]
        if len(args) == 1 and isinstance(args[0], torch.SymFloat) and (exact := _exact(args[0])) is not None:
            return exact
        return builtins.int(*args, **options)


def _len(given: Any) -> Any:
    """`len`, which keeps the symbolic size of a tensor."""
    return given.shape[0] if isinstance(given, Tensor) and given.dim() else builtins.len(given)


def _exact(number: torch.SymFloat) -> Any:
    """The integer that `number` is for all values of its symbols; None where that cannot be told."""
    node = number.node
    quotients = {FloatTrueDiv: lambda a, b: a / b, IntTrueDiv: lambda a, b: a / b, ToFloat: lambda a: a}
    found = node.expr
    for function, plain in quotients.items():
        found = found.replace(function, plain)
    found = sympy.nsimplify(sympy.simplify(found), rational=True)
    symbols = sorted(found.free_symbols, key=str)
    if not symbols or not found.is_polynomial(*symbols):
        return None
    if not all(factor.is_Integer for factor in sympy.Poly(found, *symbols).coeffs()):
        return None
    return node.shape_env.create_symintnode(found, hint=builtins.int(node.hint))


_SYMBOLIC = {"int": _Int, "len": _len}


@contextmanager
def symbolic_int(module: nn.Module) -> Iterator[None]:
    """Inside the context, `int` and `len` are symbolic in the files of `module`'s parts and functions they import."""
    files = {type(part).__module__ for part in module.modules()}
    scopes = [vars(sys.modules[name]) for name in files if name in sys.modules and not name.startswith("torch.")]
    functions = [value for scope in scopes for value in scope.values() if isinstance(value, FunctionType)]
    scopes += [one.__globals__ for one in functions if not one.__module__.startswith("torch.")]
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
