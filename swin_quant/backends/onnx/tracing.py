"""Shorter ways through torch's exporter to ONNX, to the same graph.

torch.export records a cast for each `x.float()`, also where x is float32, and the lines of Python behind each operator.
torch.onnx.export traces the recorded program a second time to decompose operators that ONNX lacks, which most networks
have none of, and computes each operator once more to see where types are promoted. It also lists all operators for each
namespace that has some, reads all translations for each export, and an ONNX schema for each node.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._export import utils
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
# Views that torch always decomposes, although the exporter translates them
_TRANSLATED = (_aten.chunk.default, _aten.contiguous.default, _aten.reshape.default)
_RESHAPES = (_aten.flatten.using_ints, _aten.unflatten.int)


@contextmanager
def short_traces() -> Iterator[None]:
    """Inside the context, torch.onnx.export records no idle operations, and computes nothing again that is known."""
    from onnx_ir.schemas import OpSignature
    from torch.onnx._internal.exporter import _registration
    from torch.onnx._internal.fx.passes import type_promotion

    decompose, interpreter = ExportedProgram.run_decompositions, type_promotion._TypePromotionInterpreter

    def decompose_if_needed(program: ExportedProgram, table: Any = None, **options: Any) -> ExportedProgram:
        if table is not None and is_translated(program, table):
            return program
        return decompose(program, table, **options)

    def promote(self: Any, node: fx.Node) -> Any:
        with self._set_current_node(node):
            if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        is_known = node.op == "call_function" and "val" in node.meta
        return node.meta["val"] if is_known else fx.Interpreter.run_node(self, node)

    read, signatures = OpSignature.from_op_schema, dict[Any, Any]()

    def signature(schema: Any) -> Any:
        key = schema.domain, schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = read(schema)
        return signatures[key]

    changes: list[tuple[Any, str, Any]] = [
        (fx.config, "do_not_emit_stack_traces", True),
        (ExportedProgram, "run_decompositions", decompose_if_needed),
        (interpreter, "run_node", promote),
        (utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops)),
        (_registration.onnxscript_apis, "get_torchlib_ops", _list_translations),
        (OpSignature, "from_op_schema", signature),
    ]
    with ExitStack() as changed:
        for place, name, value in changes:
            changed.enter_context(patch.object(place, name, value))
        changed.enter_context(_WithoutIdleOperations())
        yield


@cache
def _list_translations() -> list[Any]:
    """onnxscript's translations, without a field for which it parses the source of each."""
    from onnxscript.function_libs.torch_lib import ops, registration  # `ops` registers them

    del ops
    kinds = ((False, "overloads"), (True, "complex"))
    return [
        SimpleNamespace(qualified_name=name, function=function, is_complex=is_complex)
        for name, found in registration.default_registry.items()
        if not name.startswith("internal::")
        for is_complex, kind in kinds
        for function in getattr(found, kind)
    ]


class _WithoutIdleOperations(TorchFunctionMode):
    """Casts to the type that a tensor has, and dropout outside training, return their input."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = function is Tensor.float or (function is Tensor.to and len(args) == 2 and not kwargs)
        if is_cast and args[0].dtype is (args[1] if args[1:] else torch.float32):
            return args[0]
        if function is F.dropout and not kwargs.get("training", True):
            return args[0]
        return function(*args, **kwargs)


def is_translated(program: ExportedProgram, table: Mapping[Any, Callable[..., Any]]) -> bool:
    """Whether the exporter translates each operator of a program; if so, casts and reshapes are rewritten, in place.

    `table`: the decompositions of what it does not translate. Of the operators that torch can decompose, those that are
    not in the table are translated.
    """
    kept = {*torch.export.default_decompositions(), *_TRANSLATED, *_RESHAPES, _aten.to.dtype}
    for node in program.graph.nodes:
        operator = node.target
        if isinstance(operator, torch._ops.HigherOrderOperator):
            return False
        if isinstance(operator, torch._ops.OpOverload):
            is_composite = operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            if operator in table or operator._schema.is_mutable or (is_composite and operator not in kept):
                return False
        if operator in _RESHAPES and sum(not isinstance(side, int) for side in node.meta["val"].shape) > 1:
            return False
        if operator is _aten.chunk.default:  # ONNX's Split has as many parts as it is asked for, torch may have fewer
            parts = node.meta["val"]
            if len(parts) != node.args[1] or any(part.shape != parts[0].shape for part in parts):
                return False
        if operator is _aten.to.dtype and (len(node.args) > 2 or node.kwargs):
            return False
    for node in list(program.graph.nodes):
        if node.target in _RESHAPES:
            sides = [side if isinstance(side, int) else -1 for side in node.meta["val"].shape]
            node.target, node.args, node.kwargs = _aten.reshape.default, (node.args[0], sides), {}
        elif node.target is _aten.to.dtype and node.args[0].meta["val"].dtype is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
        elif node.target is _aten.to.dtype:
            node.target, node.args, node.kwargs = _aten._to_copy.default, node.args[:1], {"dtype": node.args[1]}
    program.graph_module.recompile()
    return True
