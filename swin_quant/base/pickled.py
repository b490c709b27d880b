"""Read pickles as data. No name in a pickle is imported or called: `find` gives a stand-in for it, or refuses.

A small machine runs the opcodes for dictionaries, lists, tuples, sets, text and numbers. Its result is a tree that is
safe to walk: bounded in depth and in size, however much of it is shared, and without circles. The work is bounded, too:
one list can be an argument of every call, and each call may copy it.
"""

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

_MAX_OPCODES, _MAX_VALUES, _MAX_DEPTH, _MAX_BITS = 400_000, 4_000_000, 100, 512
_MAX_KEY_PARTS, _MAX_TEXT = 16, 4096  # parts of a key, characters of a name
_COPIED = 2  # levels below the arguments that a call may copy
_SCALARS = (str, int, float, bool, bytes, type(None))


class Malformed(ValueError):
    """The bytes are no pickle of plain data."""


@dataclass(frozen=True)
class Opaque:
    """A stand-in for an object that is neither plain data nor a dense tensor of a common type; `what` describes it."""

    what: str
    is_tensor: bool = False


@dataclass(frozen=True)
class Known:
    """A stand-in for a class or function: `make` is called with the pickle's arguments."""

    name: str
    make: Callable[..., Any]


class Attributes(dict[Any, Any]):
    """A stand-in for an object that is kept: its attributes by name, or the parts of its state by number."""


class Ordered(dict[Any, Any]):
    """A stand-in for an OrderedDict; a module's state_dict has `versions`, {module: its version}."""

    __slots__ = ("versions",)
    versions: dict[Any, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """As an OrderedDict, which every reader knows."""
        return OrderedDict, (), None, None, iter(self.items())


def load(
    file: BinaryIO, find: Callable[[str], Known], persistent: Callable[[Any], Any] = lambda key: _refuse("PERSID")
) -> Any:
    """The next pickle of `file`, which is left at its end. Raises Malformed, and whatever `find` raises.

    `find` is called for every `module.name`, `persistent` for every object outside the pickle.
    """
    try:
        return _bounded(_run(file, find, persistent))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Malformed(str(error)) from error


def _run(file: BinaryIO, find: Callable[[str], Known], persistent: Callable[[Any], Any]) -> Any:
    """The result of a pickle's opcodes, which work on a stack, its marks, and a memo."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    left = _MAX_VALUES

    def above_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def top(count: int) -> list[Any]:
        """Take the last `count` values from the stack."""
        if len(stack) < count:
            raise Malformed("the stack is empty")
        return [stack.pop() for _ in range(count)][::-1]

    def charge(values: Any, depth: int = _COPIED) -> Any:
        """Count the values that a call may copy, and return them. Malformed if all calls together copy too many."""
        nonlocal left
        left -= len(values)
        if left < 0:
            raise Malformed("too many values")
        for part in _parts(values) if depth else ():
            if isinstance(part, dict | list | tuple):
                charge(part, depth - 1)
        return values

    argument: Any
    for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        if count > _MAX_OPCODES:
            raise Malformed(f"more than {_MAX_OPCODES:,} opcodes")
        match opcode.name:
            case "STOP":
                return stack.pop()
            case "PROTO" | "FRAME":
                pass
            case name if name in _LITERALS:
                if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
                    raise Malformed("a number of too many digits")
                stack.append(argument)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":  # a list hashes nothing
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "MARK":
                marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK":
                above_mark()
            case "DUP":
                stack.append(stack[-1])
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(top(int(opcode.name[-1]))))
            case "TUPLE":
                stack.append(tuple(above_mark()))
            case "LIST" | "FROZENSET":
                stack.append(above_mark())
            case "DICT":
                stack.append(_put({}, above_mark()))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                values = top(1) if opcode.name == "APPEND" else above_mark()
                if not isinstance(stack[-1], Opaque):
                    _expect(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = top(2) if opcode.name == "SETITEM" else above_mark()
                if not isinstance(stack[-1], Opaque):
                    _put(_expect(dict, stack[-1]), values)
            case "GLOBAL":
                stack.append(find(".".join(argument.split(" ", 1))))
            case "STACK_GLOBAL":
                name, module = _expect(str, stack.pop()), _expect(str, stack.pop())
                if len(module) + len(name) > _MAX_TEXT:
                    raise Malformed("a name of too many letters")
                stack.append(find(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ":
                values = charge(_expect(tuple, stack.pop()))
                stack.append(_expect(Known, stack.pop()).make(*values))
            case "BINPERSID":
                stack.append(persistent(charge(_expect(tuple, stack.pop()))))
            case "BUILD":  # attributes of a stand-in that keeps them, versions in a state_dict's `_metadata`; no others
                state = stack.pop()
                if isinstance(stack[-1], Attributes):
                    attributes = dict(enumerate(state)) if isinstance(state, tuple) else _expect(dict, state)
                    stack[-1].update(charge(attributes, 0))
                elif isinstance(stack[-1], Ordered) and isinstance(state, dict):
                    notes = state.get("_metadata")
                    pairs = notes.items() if isinstance(notes, dict) else ()
                    stack[-1].versions = {key: one.get("version") for key, one in pairs if isinstance(one, dict)}
            case _:
                _refuse(opcode.name)
    raise Malformed("no end")


def mapping(pairs: Any = ()) -> dict[Any, Any]:
    """A plain dictionary for one of any class. Malformed for a key that is not a number, text, or a tuple of them."""
    found = list(pairs.items()) if isinstance(pairs, dict) else items(pairs)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in found):
        # Long ones, each the same, would take all memory
        raise Malformed("a dictionary made of something else than pairs")
    return _put(Ordered(), [item for pair in found for item in pair])


def items(values: Any = ()) -> list[Any]:
    """The items of a list, tuple or set; Malformed for any other iterable, which could be endless."""
    return list(values) if isinstance(values, list | tuple) else _expect(list, values)


def _put(content: dict[Any, Any], flat: list[Any]) -> dict[Any, Any]:
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        parts = key if isinstance(key, tuple) else (key,)  # hashing or comparing any other could take for ever
        is_plain = all(isinstance(part, _SCALARS) for part in parts)
        texts = (part for part in parts if isinstance(part, str | bytes))
        if not is_plain or len(parts) > _MAX_KEY_PARTS or any(len(text) > _MAX_TEXT for text in texts):
            raise Malformed("a key that is no plain value")
        content[key] = value
    return content


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise Malformed(f"a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _refuse(name: str) -> Any:
    raise Malformed(f"opcode {name} is not one of plain data")


_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8".split()
)


def _bounded(root: Any) -> Any:
    """`root`, unless it contains itself, is too deep, or too large with shared parts counted each time."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    path: set[int] = set()
    pending = [(root, False)]
    while pending:
        value, done = pending.pop()
        key = id(value)
        if key in sizes or not isinstance(value, dict | list | tuple):
            continue
        inside = list(_parts(value))
        if not done:
            if key in path:
                raise Malformed("it contains itself")
            path.add(key)
            pending += [(value, True), *((part, False) for part in inside)]
            continue
        path.discard(key)
        sizes[key] = 1 + sum(sizes.get(id(part), 1) for part in inside)
        depths[key] = 1 + max((depths.get(id(part), 0) for part in inside), default=0)
        if sizes[key] > _MAX_VALUES or depths[key] > _MAX_DEPTH:
            raise Malformed("too deep, or too many values")
    return root


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
