"""Read pickles as data. No name in a pickle is imported or called: `find_class` gives a stand-in for it, or refuses.

A small machine runs the opcodes for dictionaries, lists, tuples, sets, text and numbers. Its result is a tree that is
safe to walk: bounded in depth and in size, however much of it is shared, and without circles. The work is bounded, too:
one list can be an argument of every call, and each call may copy it. (The standard library's unpickler hashes any key,
and fills a memo of any size.)
"""

import pickletools
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from types import FunctionType
from typing import Any, BinaryIO

_MAX_OPCODES, _MAX_VALUES, _MAX_DEPTH, _MAX_BITS = 400_000, 4_000_000, 100, 512
_MAX_KEY_PARTS, _MAX_TEXT = 16, 4096  # parts of a key, characters of a name
_COPIED = 2  # levels below the arguments that a call may copy
_SCALARS = (str, int, float, bool, bytes, type(None))
_CONSTANTS: dict[str, Any] = {
    **{"NONE": None, "NEWTRUE": True, "NEWFALSE": False},
    **{"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_SET": [], "EMPTY_TUPLE": ()},  # a list hashes nothing
}
_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8".split()
)


class Malformed(ValueError):
    """The bytes are no pickle of plain data."""


@dataclass(frozen=True)
class Opaque:
    """A stand-in for an object that is neither plain data nor a dense tensor of a common type; `what` describes it."""

    what: str
    is_tensor: bool = False


class Attributes(dict[Any, Any]):
    """A stand-in for an object that is kept: its attributes by name, or the parts of its state by number."""


class Ordered(dict[Any, Any]):
    """A stand-in for an OrderedDict; a module's state_dict has `versions`, {module: its version}."""

    __slots__ = ("versions",)
    versions: dict[Any, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """As an OrderedDict, which every reader knows."""
        return OrderedDict, (), None, None, iter(self.items())


class Unpickler:
    """Reads the pickles in a file, one by one; `torch.load` takes it for one of the module `pickle`.

    A subclass gives the function that stands for a class or function, and the object of an identity outside the pickle.
    The functions are called with the pickle's arguments; nothing else ever is.
    """

    def __init__(self, file: BinaryIO, **options: Any) -> None:
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        raise Malformed(f"the name {module}.{name}")

    def persistent_load(self, key: Any) -> Any:
        raise Malformed("an object outside the pickle")

    def load(self) -> Any:
        """The next pickle of the file, which is left at its end. Raises Malformed, and whatever a subclass raises."""
        try:
            content = self._run()
            _measure(content, {})
            return content
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise Malformed(str(error)) from error

    def _run(self) -> Any:
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
        for count, (opcode, argument, _) in enumerate(pickletools.genops(self._file)):
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
                case name if name in _CONSTANTS:
                    stack.append(copy(_CONSTANTS[name]))
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
                    stack.append(self.find_class(*argument.split(" ", 1)))
                case "STACK_GLOBAL":
                    name, module = _expect(str, stack.pop()), _expect(str, stack.pop())
                    if len(module) + len(name) > _MAX_TEXT:
                        raise Malformed("a name of too many letters")
                    stack.append(self.find_class(module, name))
                case "REDUCE" | "NEWOBJ":
                    values = charge(_expect(tuple, stack.pop()))
                    stack.append(_expect(FunctionType, stack.pop())(*values))
                case "BINPERSID":
                    # Of torch: ('storage', type, key, ...), before version 1.6 also ('module', class, file, source)
                    identity = _expect(tuple, stack.pop())
                    if identity[0] == "module":
                        stack.append(identity[1])
                        continue
                    is_plain = not any(isinstance(part, dict | list | tuple) for part in identity)
                    if not is_plain or not _expect(str, identity[2]).isdecimal():  # torch finds "a" by "A", too
                        raise Malformed("an identity of no storage")
                    stack.append(self.persistent_load(identity))
                case "BUILD":  # attributes of a stand-in that keeps them, versions in a state_dict's `_metadata`
                    state = stack.pop()
                    if isinstance(stack[-1], Attributes):
                        attributes = dict(enumerate(state)) if isinstance(state, tuple) else _expect(dict, state)
                        stack[-1].update(charge(attributes, 0))
                    elif isinstance(stack[-1], Ordered) and isinstance(state, dict):
                        notes = state.get("_metadata")
                        pairs = notes.items() if isinstance(notes, dict) else ()
                        stack[-1].versions = {key: one.get("version") for key, one in pairs if isinstance(one, dict)}
                case _:
                    raise Malformed(f"opcode {opcode.name} is not one of plain data")
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


def _measure(value: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """The number of values in a tree, shared parts counted each time, and its depth. Malformed for too many or deep."""
    if not isinstance(value, dict | list | tuple):
        return 1, 0
    if depth > _MAX_DEPTH:
        raise Malformed("too deep, or it contains itself")
    if id(value) not in known:
        inside = [_measure(part, known, depth + 1) for part in _parts(value) if isinstance(part, dict | list | tuple)]
        size = 1 + len(value) - len(inside) + sum(count for count, _ in inside)
        known[id(value)] = size, 1 + max((height for _, height in inside), default=0)
        if size > _MAX_VALUES or known[id(value)][1] > _MAX_DEPTH:
            raise Malformed("too deep, or too many values")
    return known[id(value)]


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
