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
    machine = _Machine(find, persistent)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if count > _MAX_OPCODES:
                raise Malformed(f"more than {_MAX_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return _bounded(machine.stack.pop())
            machine.run(opcode.name, argument)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Malformed(str(error)) from error
    raise Malformed("no end")


class _Machine:
    """The stack, its marks, and the memo while a pickle is read."""

    def __init__(self, find: Callable[[str], Known], persistent: Callable[[Any], Any]) -> None:
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.left = _MAX_VALUES

    def run(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
                raise Malformed("a number of too many digits")
            stack.append(argument)
        elif name in _MADE:
            stack.append(_MADE[name]())
        elif name in _CALLS:
            _CALLS[name](self)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[argument])
        elif name == "GLOBAL":
            stack.append(self.find(".".join(argument.split(" ", 1))))
        elif name not in ("PROTO", "FRAME"):
            _refuse(name)

    def above_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def find_global(self) -> None:
        name, module = _expect(str, self.stack.pop()), _expect(str, self.stack.pop())
        if len(module) + len(name) > _MAX_TEXT:
            raise Malformed("a name of too many letters")
        self.stack.append(self.find(f"{module}.{name}"))

    def call(self) -> None:
        arguments = _expect(tuple, self.stack.pop())
        self.charge(arguments)
        self.stack.append(_expect(Known, self.stack.pop()).make(*arguments))

    def stored(self) -> None:
        identity = _expect(tuple, self.stack.pop())
        self.charge(identity)
        self.stack.append(self.persistent(identity))

    def charge(self, values: Any, depth: int = _COPIED) -> None:
        """Count the values that a call may copy. Malformed if all calls together copy too many."""
        self.left -= len(values)
        if self.left < 0:
            raise Malformed("too many values")
        if depth:
            for part in _parts(values):
                if isinstance(part, dict | list | tuple):
                    self.charge(part, depth - 1)

    def top(self, count: int) -> list[Any]:
        """Take the last `count` values from the stack."""
        if len(self.stack) < count:
            raise Malformed("the stack is empty")
        return [self.stack.pop() for _ in range(count)][::-1]


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
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,  # a list hashes nothing
}


def _grow(m: _Machine, values: list[Any]) -> None:
    if not isinstance(m.stack[-1], Opaque):
        _expect(list, m.stack[-1]).extend(values)


def _fill(m: _Machine, flat: list[Any]) -> None:
    if not isinstance(m.stack[-1], Opaque):
        _put(_expect(dict, m.stack[-1]), flat)


def _build(m: _Machine) -> None:
    """Set attributes on a stand-in that keeps them, and the versions in a state_dict's `_metadata`; drop any others."""
    state = m.stack.pop()
    if isinstance(m.stack[-1], Attributes):
        attributes = dict(enumerate(state)) if isinstance(state, tuple) else _expect(dict, state)
        m.charge(attributes, 0)
        m.stack[-1].update(attributes)
    elif isinstance(m.stack[-1], Ordered) and isinstance(state, dict):
        notes = state.get("_metadata")
        pairs = notes.items() if isinstance(notes, dict) else ()
        m.stack[-1].versions = {key: note.get("version") for key, note in pairs if isinstance(note, dict)}


def _collect(make: Callable[[list[Any]], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(make(m.above_mark()))


_CALLS: dict[str, Callable[[_Machine], Any]] = {
    "MARK": lambda m: m.marks.append(len(m.stack)),
    "POP": lambda m: m.stack.pop(),
    "POP_MARK": lambda m: m.above_mark(),
    "DUP": lambda m: m.stack.append(m.stack[-1]),
    "MEMOIZE": lambda m: m.memo.update({len(m.memo): m.stack[-1]}),
    "TUPLE1": lambda m: m.stack.append(tuple(m.top(1))),
    "TUPLE2": lambda m: m.stack.append(tuple(m.top(2))),
    "TUPLE3": lambda m: m.stack.append(tuple(m.top(3))),
    "TUPLE": _collect(tuple),
    "LIST": _collect(list),
    "FROZENSET": _collect(list),
    "DICT": _collect(lambda flat: _put({}, flat)),
    "APPEND": lambda m: _grow(m, m.top(1)),
    "APPENDS": lambda m: _grow(m, m.above_mark()),
    "ADDITEMS": lambda m: _grow(m, m.above_mark()),
    "SETITEM": lambda m: _fill(m, m.top(2)),
    "SETITEMS": lambda m: _fill(m, m.above_mark()),
    "STACK_GLOBAL": _Machine.find_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _build,
    "BINPERSID": _Machine.stored,
}


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
