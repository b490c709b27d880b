"""Check the calls of the Python functions: their arguments by kind, and torch's default type."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import torch

from swin_quant.base.errors import UsageError, is_command, offered
from swin_quant.base.files import shipped_files

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WORDS = {"model": "a model", "pictures": "pictures", "policy": "a policy", "backend": "a backend"}
_EXPECTED = {  # the kind of a parameter, by its name
    **dict.fromkeys(("model", "module", "exported"), "model"),
    **dict.fromkeys(("pictures", "images"), "pictures"),
    **dict.fromkeys(("policy", "policies"), "policy"),
    **dict.fromkeys(("backend", "engine"), "backend"),
}
_CLASSES = {  # by name, since some are slow to import
    **dict.fromkeys(("Model", "Module", "Exported"), "model"),
    **dict.fromkeys(("PictureSet", "Tensor", "ndarray", "DataLoader"), "pictures"),
    "Policy": "policy",
}
_PLAIN = {str: "text", Path: "a path", bool: "True or False", int: "a whole number", float: "a number"}
_SHOWN = {"checkpoint": "'path/of/checkpoint.pth'"}  # an argument in the right call, where its name says too little
_CALLED = {  # a command's or another function's word for an argument -> its names here
    "cfg": ("config",),
    "data_path": ("pictures", "images"),
    "output": ("folder",),
    "calibrator": ("method",),
    "float": ("original",),
    "batch": ("batch_size",),
    "set": ("changes",),
    "lr": ("changes",),
    **dict.fromkeys(("bits", "wprec", "aprec"), ("policy", "policies")),
    "policy": ("policies",),
    "policies": ("policy",),
    "engine": ("backend",),
    "backend": ("engine",),
}


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, which refuses missing, unknown and exchanged arguments by a UsageError with the right call."""
    signature, name = inspect.signature(function), function.__name__

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if is_command():  # its arguments were parsed by their names
            return function(*args, **options)
        given = _bind(name, signature, args, options)
        if torch.get_default_dtype() is not torch.float32:
            default = str(torch.get_default_dtype()).removeprefix("torch.")
            raise UsageError(f"{name}: torch's default type is {default}: call torch.set_default_dtype(torch.float32)")
        kinds = {key: _kinds(value) for key, value in given.items()}
        free = [_EXPECTED[key] for key in signature.parameters if key in _EXPECTED]
        free = [kind for kind in free if not any(_EXPECTED.get(key) == kind in its for key, its in kinds.items())]
        for key, its in kinds.items():
            if signature.parameters[key].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
                continue  # it was named; and the word `float` is a precision, too, `cuda` a device
            for kind in (one for one in free if one in its and _EXPECTED.get(key) not in its):
                value = f", {given[key]!r}" if isinstance(given[key], str) else ""
                remedy = f"call {_right_call(name, signature, given, {key: kind})}"
                raise UsageError(f"{name}: ‹{key}› is {_WORDS[kind]}{value}: {remedy}")
        _check_types(name, get_type_hints(function), given)
        return function(*args, **options)

    return call


def checked_class(kind: type[_R]) -> type[_R]:
    """`kind`, whose constructor refuses missing and unknown arguments by a UsageError with the right call."""
    make, signature = kind.__init__, inspect.signature(kind)
    if hasattr(make, "__wrapped__"):
        return kind

    @wraps(make)
    def construct(self: _R, *args: Any, **options: Any) -> None:
        if not is_command():
            _check_types(kind.__name__, get_type_hints(kind), _bind(kind.__name__, signature, args, options))
        make(self, *args, **options)

    kind.__init__ = construct  # type: ignore[assignment, method-assign]
    return kind


def _check_types(name: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """UsageError for a number where only others fit, for text where only numbers do, for a mapping in place of a class.

    An argument that also takes other classes, such as a model, is checked by its function.
    """
    for key, value in given.items():
        taken = [kind for kind in get_args(hints.get(key)) or [hints.get(key)] if kind is not type(None)]
        taken = [kind for kind in taken if get_origin(kind) not in (tuple, Sequence)]
        plain = {kind: word for kind, word in _PLAIN.items() if kind in taken}
        data = {kind: f"a {kind.__name__}" for kind in taken if isinstance(kind, type) and is_dataclass(kind)}
        due: dict[Any, str] = plain | data
        fits = value is None or type(value) in due or (type(value) is int and float in due)
        asked = {*_PLAIN, dict} - {str} if data else {*_PLAIN}
        if due.keys() == {*taken} and type(value) in asked and not fits:
            raise UsageError(f"{name}: {key} is {value!r:.60}: must be {' or '.join(due.values())}")


def _bind(name: str, signature: inspect.Signature, args: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names. UsageError where one is missing or unknown."""
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    for word in (word for word in options if word not in signature.parameters):
        right = next((one for one in _CALLED.get(word, ()) if one in signature.parameters), None)
        if takes_any and not right:  # a further option, or a misspelt argument
            right = next(iter(get_close_matches(word, signature.parameters, 1, 0.8)), None)
        if right or not takes_any:
            near = f"; did you mean {right}?" if right else offered(word, signature.parameters)
            raise UsageError(f"{name}: got an unexpected keyword argument '{word}'{near}")
    try:
        given = signature.bind(*args, **options).arguments
    except TypeError as error:
        raise UsageError(f"{name}: {error}: call {_right_call(name, signature, {}, {})}") from None
    wanted = [one for one in signature.parameters.values() if _is_needed(one) and given.get(one.name) is None]
    if wanted:
        call_ = _right_call(name, signature, {}, {})
        raise UsageError(f"{name}: missing a required argument: '{wanted[0].name}': call {call_}")
    return given


def _kinds(value: Any) -> set[str]:
    """The kinds that an argument has for certain; a name may be that of a policy and of a backend."""
    if isinstance(value, list | tuple | Mapping):
        inner = [*(value.values() if isinstance(value, Mapping) else value)]
        return _kinds(inner[0]) if inner else set()
    if isinstance(value, str) and not Path(value).exists():
        from swin_quant.backends.registry import backends

        names = {"policy": {path.stem for path in shipped_files("policies")}, "backend": set(backends())}
        return {kind for kind, known in names.items() if value in known}
    return {kind for one in type(value).__mro__ for kind in [_CLASSES.get(one.__name__)] if kind}


def _right_call(name: str, signature: inspect.Signature, given: Mapping[str, Any], moved: Mapping[str, str]) -> str:
    """The call with each needed argument, and those `moved` to the parameter of their kind; texts as they are. The
    others keep their order."""
    texts = {key: repr(value) for key, value in given.items() if isinstance(value, str)}
    if moved:  # what was not moved stays in its order
        right = {next(one for one in signature.parameters if _EXPECTED.get(one) == moved[key]): key for key in moved}
        left = iter([key for key in given if key not in moved])
        order = [one for one in signature.parameters if one in given or one in right]
        stands = {one: right[one] if one in right else next(left, "") for one in order}
        texts = {one: texts[key] for one, key in stands.items() if key in texts}
    shown = []
    for key, parameter in signature.parameters.items():
        is_needed = _is_needed(parameter)
        if is_needed or (moved and key in texts) or _EXPECTED.get(key) in moved.values():
            shown.append(("" if is_needed else f"{key}=") + texts.get(key, _SHOWN.get(key, key)))
    return f"sq.{name}({', '.join(shown)})"


def _is_needed(parameter: inspect.Parameter) -> bool:
    """Whether a caller in Python has to give an argument; a command has pictures from a config, too."""
    is_placed = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    return is_placed and (parameter.default is parameter.empty or parameter.name == "pictures")
