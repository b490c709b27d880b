"""Why a module cannot be captured, and at which line of the user's code."""

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

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
        return "what it computes depends on values in tensors, which are not known here: write it by torch.where"
    if "UnsupportedOperator" in type(error).__name__:
        return f"operator {first_line(error)} has no form without data: write one, torch.library.register_fake"
    if "fake tensor in the exported program" in str(error):
        return "it sets or reads `.data` of a parameter, or keeps a tensor for its next call: use the parameter itself"
    return first_line(error)
