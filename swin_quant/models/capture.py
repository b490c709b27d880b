"""Capture a network's forward pass in evaluation mode with torch.export, as a graph that calls the network's own
modules.

torch.export writes every operation in ATen's names, with parameters as inputs. Here parameters become reads of the
network's attributes; the operations of a torch module become one call of that module, which trains as before; constants
that depend on no parameter become buffers. A node's `meta["val"]` is its value without data (sizes, dtype), and
`meta["depends"]` says whether it depends on the pictures.
"""

import operator
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from swin_quant.base.errors import SwinQuantError, first_line, listed
from swin_quant.base.progress import silence
from swin_quant.models.while_captured import NOISE, attention_opened, is_torchs, noise_kept

CONSTANT = "_tensor_constant"  # the start of the names of constants that capturing found
_WHOLE = (nn.LayerNorm,)  # modules that stay one call, with their subclasses
_CHECKS = re.compile(r"_assert|sym_constrain|_check|guard")
_UNCHANGED = frozenset("alias detach detach_ lift lift_fresh lift_fresh_copy lift_fresh_".split())
_SAME_TYPE = frozenset("to _to_copy type_as".split())
_RANDOM = re.compile(r"rand|bernoulli|dropout|multinomial|normal|uniform|exponential")
_FILLED = re.compile(r"(new_)?(zeros|ones|full|empty)(_like)?")  # new tensors whose size an input may give
_BIGGEST_CONSTANT = 1 << 26  # elements


def capture(
    module: nn.Module,
    pictures: Tensor | Mapping[str, Tensor],
    what: str,
    *,
    any_size: bool = False,
    outputs: Sequence[int] | None = None,
    decompose: bool = False,
) -> fx.Graph:
    """The graph of `module`, which is in evaluation mode: pictures [B, ...] or inputs by name -> outputs, for every B.

    `any_size`: for every height and width too, if the module can. `outputs`: the positions of the wanted outputs in the
    tree of its output. SwinQuantError names `what`, the obstacle, and the line of the user's code.
    """
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # sympy takes a fifth of the start of a command

    from swin_quant.models.symbolic_int import export_program

    named = pictures if isinstance(pictures, Mapping) else {}
    with noise_kept(module), attention_opened(module), silence(), torch.no_grad():
        try:
            program = export_program(module, () if named else (pictures,), dict(named), (0, 2, 3) if any_size else (0,))
            if decompose:
                program = program.run_decompositions({})
        except Exception as error:  # a forward pass may raise anything on fake tensors
            place = _find_last_user_frame(traceback.extract_tb(error.__traceback__))
            raise SwinQuantError(f"{what}: cannot be captured{place}: {_reason(error)}") from error
    graph = _on_attributes(program, module, what, outputs, named)
    for value in (node.meta["val"] for node in graph.nodes if node.op == "placeholder"):
        if is_concrete_int(value.shape[0]):
            remedy = "take the batch from `x.shape[0]`, as a whole number, and loop over no batch"
            # The line of the user's code that fixed the size, if torch kept it
            places = getattr(getattr(value, "fake_mode", None), "shape_env", None)
            kept = [one.framework_loc for one in getattr(places, "replacements_slocs", {}).values()]
            line = _find_last_user_frame([one for one in kept if isinstance(one, traceback.FrameSummary)])
            fixed = f"its forward pass fits batches of {len(value)} alone{line}"
            raise SwinQuantError(f"{what}: {fixed}: {remedy}")
    _drop_checks(graph)
    graph.owning_module = module  # type: ignore[assignment] # it expects modules only
    _mark_dependence(graph)
    _fold_constants(graph, module)
    if not _replace_in_place_calls(graph):
        if decompose:
            raise SwinQuantError(f"{what}: writes into tensors in a way that is not supported")
        return capture(module, pictures, what, any_size=any_size, outputs=outputs, decompose=True)
    for part in module.modules():
        if getattr(part, "inplace", False):
            part.inplace = False  # type: ignore[assignment]  # the graph has what it wrote
    _call_modules(graph, module)
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:  # strides are from another pass
            node.target = torch.ops.aten.reshape.default
    graph.eliminate_dead_code()
    return graph


def packet(node: fx.Node) -> str:
    """The name of an operation of ATen without its overload, such as `add_`; "" for any other node."""
    name = getattr(node.target, "overloadpacket", None)
    return str(getattr(name, "__name__", "")) if node.op == "call_function" else ""


def stack(node: fx.Node) -> tuple[str, str]:
    """The innermost module call around an operation: a key that identifies the call, and the module's path."""
    found = list((node.meta.get("nn_module_stack") or {}).items())
    key, (path, _) = found[-1] if found else ("", ("", ""))
    return (key, path) if not path.startswith("_empty") else ("", "")


def _on_attributes(
    program: Any, module: nn.Module, what: str, outputs: Sequence[int] | None, inputs: Iterable[str]
) -> fx.Graph:
    """The program's graph, reading parameters, buffers and constants of `module` by name, and `inputs`, if they have
    names."""
    attributes: dict[str, str] = {}
    for number, spec in enumerate(program.graph_signature.input_specs):
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            attributes[spec.arg.name] = str(spec.target)
        elif kind == "CONSTANT_TENSOR" and (held := _find_name(program.constants[spec.target], module)):
            attributes[spec.arg.name] = held
        elif kind == "CONSTANT_TENSOR":
            own = str(spec.target).replace(".", "_")
            attributes[spec.arg.name] = name = f"{CONSTANT}_{number}_{own}"
            module.register_buffer(name, program.constants[spec.target].detach().clone(), persistent=False)
        elif kind != "USER_INPUT":
            raise SwinQuantError(f"{what}: reads {spec.target or spec.arg.name}, which is no tensor: not supported")
    kinds = [spec.kind.name for spec in program.graph_signature.output_specs]
    if not {*kinds} <= {"USER_OUTPUT", "USER_INPUT_MUTATION"}:
        changed = [str(spec.target) for spec in program.graph_signature.output_specs if "INPUT" not in spec.kind.name]
        changed = [name for name in changed if name != "None"]
        raise SwinQuantError(f"{what}: its forward pass changes {listed(changed)}: a state is not supported")
    graph, copies = fx.Graph(), {}
    names = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in attributes and node.users:
            copies[node] = graph.get_attr(attributes[node.name])
            copies[node].meta = dict(node.meta)
        elif node.op == "placeholder" and node.name not in attributes:
            copies[node] = graph.placeholder(next(names, node.name))
            copies[node].meta = dict(node.meta)
    flat = _copy(program.graph_module, graph, copies, what)
    flat = [one for one, kind in zip(flat, kinds, strict=True) if kind == "USER_OUTPUT"]  # pictures stay as they are
    wanted = list(flat) if outputs is None else [flat[place] for place in outputs]
    alone = len(wanted) == 1 and (outputs is not None or program.call_spec.out_spec.is_leaf())
    graph.output(wanted[0] if alone else wanted)
    return graph


def _find_name(value: Tensor, module: nn.Module) -> str:
    """The name of the parameter or buffer that a tensor is, which the forward pass has by another way, such as a list;
    "" if it is none."""
    for name, one in chain(module.named_parameters(), module.named_buffers()):
        if one is value or (one.layout is value.layout is torch.strided and one.is_set_to(value) and one.numel()):
            return name
    return ""


def _copy(module: fx.GraphModule, graph: fx.Graph, copies: dict[fx.Node, Any], what: str) -> Any:
    """Append the operations of `module`, with those of its inner graphs, to `graph`; returns its outputs.

    An inner graph is what runs under another mode of gradients, or without autocast.
    """
    for node in module.graph.nodes:
        inner = [
            one for one in node.args if isinstance(one, fx.Node) and isinstance(_get_subgraph(one), fx.GraphModule)
        ]
        if inner:
            mode = str(getattr(node.target, "name", lambda: "")())
            if mode == "wrap_with_autocast" and node.args[2]:
                remedy = "leave torch.autocast out of the forward pass"
                raise SwinQuantError(f"{what}: computes in {node.args[1] or 'float16'} by torch.autocast: {remedy}")
            if not mode.startswith("wrap"):
                remedy = "write it by torch.where, or as a loop of a fixed length"
                raise SwinQuantError(f"{what}: calls torch's {mode}, which is not supported: {remedy}")
            operands = node.args[node.args.index(inner[0]) + 1 :]
            part = _get_subgraph(inner[0])
            places = [one for one in part.graph.nodes if one.op == "placeholder"]
            named = {
                one: copies[own] if isinstance(own, fx.Node) else own for one, own in zip(places, operands, strict=True)
            }
            copies[node] = _copy(part, graph, named, what)
        elif node.op == "output":
            return fx.map_arg(node.args[0], copies.__getitem__)
        elif node.target is operator.getitem and not isinstance(copies[node.args[0]], fx.Node):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "placeholder" and not isinstance(_get_subgraph(node), fx.GraphModule):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    raise ValueError("a graph without an output")


def _get_subgraph(node: fx.Node) -> Any:
    return getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None


def _drop_checks(graph: fx.Graph) -> None:
    """Remove checks, and operations that return their input unchanged."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and _CHECKS.search(packet(node) or str(node.target)) and not node.users:
            graph.erase_node(node)
    for node in list(graph.nodes):
        name, source = packet(node), node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        before, after = source.meta.get("val"), node.meta.get("val")
        is_unchanged = name in _UNCHANGED
        if name in _SAME_TYPE and isinstance(before, Tensor) and isinstance(after, Tensor):
            copied = node.kwargs.get("copy") or True in node.args[2:]
            is_unchanged = before.dtype == after.dtype and before.device == after.device and not copied
        if is_unchanged:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _mark_dependence(graph: fx.Graph) -> None:
    """Mark each node by whether it depends on the values of the pictures, not only on their sizes."""
    for node in graph.nodes:
        depends = any([one.meta["depends"] for one in node.all_input_nodes])
        is_size = packet(node).startswith("sym_") or _FILLED.fullmatch(packet(node))
        if is_size or not _holds_tensor(node.meta.get("val")):
            depends = False
        node.meta["depends"] = depends or node.op == "placeholder"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor) or value is None


def _fold_constants(graph: fx.Graph, module: nn.Module) -> None:
    """Compute everything that depends on no input, size or parameter once; the results become buffers."""
    values: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith(CONSTANT):
            values[node] = getattr(module, str(node.target)).clone()
        elif node.op != "call_function" or _RANDOM.search(packet(node)) or not _is_small(node.meta.get("val")):
            continue
        elif _FILLED.fullmatch(packet(node)) and node.all_input_nodes:  # in the size or type of another tensor
            like, value = packet(node), node.meta["val"]
            fill: Any = node.args[2 if "new" in like else 1] if "full" in like else float("ones" in like)
            values[node] = torch.full(tuple(value.shape), fill, dtype=value.dtype)
        elif all(one in values for one in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    for number, (node, value) in enumerate(values.items()):
        outside = [user for user in node.users if user not in values]
        if node.op == "get_attr" or not outside or not isinstance(value, Tensor):
            continue
        name = f"{CONSTANT}_folded_{number}"
        module.register_buffer(name, value.detach().clone(), persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        constant.meta = {key: node.meta[key] for key in ("val", "depends", "nn_module_stack") if key in node.meta}
        for user in outside:
            user.replace_input_with(node, constant)
    for node in reversed(values):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)


def _is_small(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_small, value))
    if isinstance(value, Tensor):
        return all(isinstance(size, int) for size in value.shape) and value.numel() <= _BIGGEST_CONSTANT
    return not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _call_modules(graph: fx.Graph, root: nn.Module) -> None:
    """Replace each torch module's operations by one call, for modules with one tensor in and one out."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    for (_, path), run in groupby(operations, stack):
        if not path:
            continue
        own, nodes = root.get_submodule(path), list(run)
        if not is_whole(own):
            continue
        prefix = f"{path}."
        inputs = dict.fromkeys(
            one
            for node in nodes
            for one in node.all_input_nodes
            if one not in nodes and not (one.op == "get_attr" and str(one.target).startswith((prefix, CONSTANT)))
        )
        gives = [node for node in nodes if any(user not in nodes for user in node.users)]
        last, its_size = nodes[-1], True
        if isinstance(own, nn.modules.conv._ConvTransposeNd):  # it may be told another size of its output
            told: Any = last.args[5] if len(last.args) > 5 else [0] * len(own.output_padding)
            its_size = tuple(told) == own.output_padding
        if len(inputs) == 1 and gives == [last] and its_size:
            with graph.inserting_before(last):
                call = graph.call_module(path, (*inputs,))
            call.meta = dict(last.meta)
            last.replace_all_uses_with(call)
            for node in reversed(nodes):
                graph.erase_node(node)


def is_whole(module: nn.Module) -> bool:
    """Whether a module stays one call: it is torch's, a layer norm, or acts only in training, without children, and
    without hooks: those of `nn.utils.weight_norm`, `spectral_norm` and `prune` compute a weight, others an output."""
    if "forward" in vars(module):  # another one than its class has
        return False
    known = isinstance(module, _WHOLE) or NOISE.search(type(module).__name__) or is_torchs(module)
    return bool(known) and not list(module.children()) and not (module._forward_pre_hooks or module._forward_hooks)


def _replace_in_place_calls(graph: fx.Graph) -> bool:
    """Replace operations that write into their first input by ones that do not, since nodes read their inputs.

    False, with the graph unusable, if another tensor may share the written memory.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            continue
        written, name = node.args[0] if node.args else None, packet(node)
        plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
        overload = getattr(plain, str(node.target).rpartition(".")[2], None)
        if not isinstance(written, fx.Node) or overload is None or not name.endswith("_"):
            return False
        if written.op in ("get_attr", "placeholder") or _is_view(written) or any(map(_is_view, written.users)):
            return False
        order = {one: place for place, one in enumerate(graph.nodes)}
        node.target = overload
        for user in [user for user in written.users if order[user] > order[node]]:
            user.replace_input_with(written, node)
    return True


def _is_view(node: fx.Node) -> bool:
    """Whether a node's output may share the memory of its input."""
    given = [one.alias_info for one in getattr(getattr(node.target, "_schema", None), "returns", ())]
    return node.target is operator.getitem or any(one is not None and not one.is_write for one in given)


def _find_last_user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last frame of the user's code, as ` at FILE:LINE `CODE``; "" if there is none."""
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}`" if own else ""


def _reason(error: BaseException) -> str:
    """The reason in an exception of torch.export, in our words where torch's mislead."""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        known = "what it computes depends on values in tensors, which are not known here"
        return f"{known}: write it by torch.where, or wrap the part before it"
    if "UnsupportedOperator" in type(error).__name__:
        return f"operator {first_line(error)} has no form without data: write one, torch.library.register_fake"
    if "fake tensor in the exported program" in str(error):
        return "it sets or reads `.data` of a parameter, or keeps a tensor for its next call: use the parameter itself"
    return first_line(error)
