"""Why a module cannot be captured, and at which line of the user's code."""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swin_quant.base.errors import first_line


def fixed_at(value: Tensor) -> str:
    """The line of the user's code that fixed an open size, if torch kept it."""
    places = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    kept = [one.framework_loc for one in getattr(places, "replacements_slocs", {}).values()]
    return find_last_user_frame([one for one in kept if isinstance(one, traceback.FrameSummary)])


def find_last_user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last frame of the user's code, as ` at FILE:LINE `CODE``; "" if there is none."""
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}`" if own else ""


def reason(error: BaseException) -> str:
    """The reason in an exception of torch.export, in our words where torch's mislead."""
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        known = "what it computes depends on values in tensors, which are not known here"
        return f"{known}: write it by torch.where, or wrap the part before it"
    if "UnsupportedOperator" in type(error).__name__:
        return f"operator {first_line(error)} has no form without data: write one, torch.library.register_fake"
    if "fake tensor in the exported program" in str(error):
        return "it sets or reads `.data` of a parameter, or keeps a tensor for its next call: use the parameter itself"
    return first_line(error)


class _Selections(TorchDispatchMode):
    """Notes the operations that give as many parts as the values of their inputs say, such as NMS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        tensors = [one for one in _pytree.tree_leaves(args[1:]) if isinstance(one, Tensor)]
        by_place = name == "aten::index" and not any(one.dtype in (torch.bool, torch.uint8) for one in tensors)
        if name.endswith("nms") or (torch.Tag.dynamic_output_shape in func.tags and not by_place):
            self.found.append(name.replace("::", "."))
        return func(*args, **(kwargs or {}))


def find_selection(module: nn.Module, call: Callable[[], object]) -> str:
    """The remedy where `call`, which runs `module`, gives as many parts as its values say: the first operation that
    does, and the largest part of the module, which may stand before it; "" if there is no such operation."""
    with _Selections() as noted:
        call()
    sizes = {name: sum(one.numel() for one in part.parameters()) for name, part in module.named_children()}
    part = f", such as `.{max(sizes, key=lambda name: sizes[name])}`" if sizes else ""
    return f"{noted.found[0]} gives as many as its values say: wrap the part before it{part}" if noted.found else ""
