"""A command made of a function: its signature gives the flags, types and defaults, its docstring the help."""

import importlib
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import cyclopts
import docstring_parser
from cyclopts import App, Group, Parameter
from rich.console import Console

from swin_quant.base.arguments import command_arguments
from swin_quant.base.errors import UsageError, command_lines, did_you_mean, listed, memory_errors_named, speaking

_MAIN, _REST, _OUTPUT = "main", "options", "output"  # groups of flags in `--help`: the first ones, and the last
_SHARED = ("model", "pictures", "policy")  # titles of flags that many commands have: behind a command's own
_IN_MAIN = {"policy", "recipe", "path", "backend", "engine", "folder", "epochs", "resume"}  # beside what is needed
_ALSO = {"bits": "wprec", "config": "cfg", "target": "backend", "data": "path", "num_epochs": "epochs"}
_LARGEST = 2**31 - 1  # every library can hold whole numbers up to it
_COMMON = {
    "json": Annotated[str | None, Parameter(help="write the result as JSON to FILE; -: print it", group=_OUTPUT)],
    "verbose": Annotated[bool, Parameter(help="more messages, and tracebacks of errors", group=_OUTPUT)],
    "quiet": Annotated[bool, Parameter(help="only results, warnings and errors", group=_OUTPUT)],
    "local_rank": Annotated[int | None, Parameter(name=["--local_rank", "--local-rank"], show=False)],
}


class Command:
    """The command `name`: parses arguments, calls its function, saves and shows the result."""

    def __init__(self, name: str) -> None:
        module = importlib.import_module(f"swin_quant.verbs.{name}")
        self.name, self.module = name, module
        self.examples: str = getattr(module, "EXAMPLES", "")
        self.saves = "save_in" in dir(inspect.signature(self.function).return_annotation)
        self.arguments = {one.name: one for one in command_arguments(self.function)}
        places = [one.name.upper() for one in self.arguments.values() if one.is_placed]
        self.app = App(
            name=f"swin-quant {name}",
            usage=" ".join(["Usage: swin-quant", name, *places, "[OPTIONS]"]),
            help=_read_docstring(self.function)[0],
            help_format="markdown",
            version_flags=[],
            default_parameter=Parameter(negative="", consume_multiple=1, allow_repeating=True, json_list=False),
            result_action="return_value",
        )
        self.app["--help"].show = False  # else a box of its own tops every help
        self.app.default(self._flat())

    @property
    def function(self) -> Callable[..., Any]:
        """The verb."""
        return cast("Callable[..., Any]", getattr(self.module, self.name))

    @cached_property
    def flags(self) -> set[str]:
        """Every flag, in all its spellings."""
        return {name for argument in self._collection for name in argument.names if name[:2] == "--"}

    @cached_property
    def _collection(self) -> cyclopts.ArgumentCollection:
        return self.app.assemble_argument_collection()

    @cached_property
    def words(self) -> dict[str, str]:
        """Field of a message -> the flag that sets it."""
        found: dict[str, str] = {}
        for argument in self._collection:
            flag = next((name for name in argument.names if name.startswith("--")), None)
            if flag and argument.field_info.name:
                found |= {argument.field_info.name: flag, flag.lstrip("-").replace("-", "_"): flag}
        return found

    def _flat(self) -> Callable[..., None]:
        """A function with an argument for each flag, for cyclopts to read."""
        parts: dict[str, inspect.Parameter] = {}
        titles = [_MAIN, _REST]  # in their order
        for one in self.arguments.values():
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if one.is_placed else inspect.Parameter.KEYWORD_ONLY
            _, notes = _read_docstring(one.fields.kind if one.fields else self.function)
            named = next((cast("tuple[str]", note.group)[0] for note in one.notes if note.group), None)
            is_usual = one.name in _IN_MAIN and (one.name != "path" or (one.fields and one.fields.title == "pictures"))
            is_main = one.is_placed or one.default is inspect.Parameter.empty or is_usual
            titles.append(title := _MAIN if is_main else named or (one.fields.title if one.fields else _REST))
            group = Group(title, sort_key=titles.index(title) + len(self.arguments) * title.startswith(_SHARED))
            parts[one.name] = _part(one.name, one.hint, one.default, notes.get(one.name, ""), kind, group)
        if self.saves:
            note = Parameter(help=r"folder of the results (default: output/\<NAME>)", group=Group(_MAIN, sort_key=0))
            parts["output"] = _part("output", Annotated[Path | None, note], None, "")
        for name, hint in _COMMON.items():
            parts[name] = _part(name, hint, False if name in ("verbose", "quiet") else None, "")

        def flat(**_: Any) -> None:
            """Never called: cyclopts reads its signature."""

        ordered = sorted(parts.values(), key=lambda part: (part.kind, part.default is not inspect.Parameter.empty))
        flat.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        flat.__annotations__ = {part.name: part.annotation for part in ordered}
        flat.__doc__ = None
        return flat

    def help(self, width: int) -> str:
        """The text of `--help`, in lines of at most `width` characters."""
        with (console := Console(width=width, file=io.StringIO(), force_terminal=False)).capture() as shown:
            self.app.help_print([], console=console)
        return shown.get() + self._examples(width)

    def _examples(self, width: int) -> str:
        """The examples in lines that a shell joins, so that they can be copied."""
        return "".join(f"{line}\n" for one in self.examples.splitlines() for line in command_lines(one, width))

    def _unknown(self, word: str) -> str:
        """The message about an unknown flag, with the one that was meant by Python's name or a word of other tools."""
        flag = word.partition("=")[0]
        field = flag.lstrip("-").replace("-", "_")
        meant = self.words.get(field) or self.words.get(_ALSO.get(field, ""))
        near = f"; did you mean {meant}?" if meant else did_you_mean(flag, {*self.flags, "--help"})
        return f"Unknown option: {flag}{near}"

    def parse(self, arguments: Sequence[str]) -> dict[str, Any] | None:
        """Flag's name -> its value, for the flags that were given; None where the help was printed."""
        try:
            called, bound, *_ = self.app.parse_args(_with_json(arguments), exit_on_error=False, print_error=False)
        except cyclopts.CycloptsError as error:
            told = re.sub(r"\. Did you mean", "; did you mean", " ".join(str(error).split()).rstrip("."))
            told = told.replace(" at least 1 element. Got 0", " an argument")  # as of a flag that takes one alone
            if isinstance(error, cyclopts.UnusedCliTokensError):
                told = self._surplus(error.unused_tokens or [], arguments)
            if isinstance(error, cyclopts.UnknownOptionError):
                told = self._unknown(error.token.keyword or error.token.value)
            if isinstance(error, cyclopts.MissingArgumentError) and (asked := error.argument):
                flags = (word for word in arguments if word[:2] == "--" and word[2:])
                unknown = (flag for flag in flags if flag.partition("=")[0] not in self.flags)
                if flag := next(unknown, None):  # a misspelt flag leaves its own missing
                    raise UsageError(f"{self._unknown(flag)}; see swin-quant {self.name} --help") from error
                given = {word.partition("=")[0] for word in arguments}
                name = asked.name if asked.index is None else asked.field_info.name.upper()
                told = told if given & {*asked.names} else f"{name} is missing: {asked.parameter.help}"
            raise UsageError(f"{told}; see swin-quant {self.name} --help") from error
        if getattr(called, "__name__", "") != "flat":
            called(*bound.args, **bound.kwargs)
            sys.stdout.write(self._examples(shutil.get_terminal_size().columns))
            return None
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise UsageError(f"‹{name}› {value}: is beyond {_LARGEST}")
            is_home = isinstance(value, str | Path) and str(value).startswith("~/")  # as in `--data-path=~/folder`
            values[name] = type(value)(os.path.expanduser(value)) if is_home else value
        return values

    def _surplus(self, surplus: Sequence[str], arguments: Sequence[str]) -> str:
        """The message about words that no argument takes; a folder among the words is likely that of the pictures."""
        places = " and ".join(one.name.upper() for one in self.arguments.values() if one.is_placed)
        taken = f"{listed(surplus)}: too many words: {self.name} takes {places or 'flags'} alone"
        folder = next((word for word in arguments if os.path.isdir(word)), None)
        if folder is None or "--data-path" not in self.flags.difference(arguments):
            return taken
        return f"{taken}; pictures are given by --data-path {shlex.quote(folder)}"

    def call(self, given: Mapping[str, Any]) -> Any:
        """The function's result for the flags that were given."""
        parameters = inspect.signature(self.function).parameters
        direct: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for name, one in self.arguments.items():
            if name in given:
                place = parts.setdefault(one.argument, {}) if one.field else direct
                place[one.field or one.argument] = given[name]
        if self.saves and "folder" in parameters:
            direct["folder"] = given.get("output") or Path("output")
        for name, inside in {one.argument: one.fields for one in self.arguments.values()}.items():
            if inside and (name in parts or parameters[name].default is inspect.Parameter.empty):
                direct[name] = inside.kind(**parts.get(name, {}))
        return self.function(**direct)


open_command = cache(Command)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run the command `name`. Returns 0; errors are raised."""
    command = open_command(name)
    with speaking(command.words):
        given = command.parse(arguments)
    if given is None:
        return 0
    from swin_quant.base import progress
    from swin_quant.base.distributed import process_group, read_launcher_rank
    from swin_quant.base.files import check_writable, ensure_writable_dir
    from swin_quant.cards.card import is_card

    json = given.get("json")
    if json not in (None, "-"):
        if is_card(Path(json)):
            raise UsageError(f"{json}: is a run card, which --json would overwrite: choose another place")
        check_writable(json)
    progress.set_up(given.get("verbose", False), given.get("quiet", False), read_launcher_rank())
    with speaking(command.words), process_group(given.get("device", "auto"), given.get("local_rank")) as world:
        with memory_errors_named():
            if command.saves and given.get("output"):
                ensure_writable_dir(given["output"], keep=world.size > 1)  # before the work; ranks share it
            result = command.call(given)
            if command.saves:
                result.save_in(given.get("output") or Path("output") / result.name, world)
        if world.is_main and result is not None:
            _show(result, json)
            if hasattr(result, "check"):
                result.check()
        sys.stdout.flush()  # flushed before this rank waits for the other ranks
    return 0


def _show(result: Any, json: str | None) -> None:
    """Show a result: `result.show()`; or its `to_json()`, in a file beside that or, for "-", alone."""
    from swin_quant.base.files import atomic_write_bytes, json_text
    from swin_quant.base.progress import log

    if json is not None:
        told = result.to_json() if hasattr(result, "to_json") else str(result)
        if json == "-":
            print(json_text(told), end="")
            return
        atomic_write_bytes(json, json_text(told).encode())
        log.info("JSON: %s", json)
    if hasattr(result, "show"):
        result.show()
    else:
        print(result)


def _part(
    name: str,
    hint: Any,
    default: Any,
    help: str,
    kind: Any = inspect.Parameter.KEYWORD_ONLY,
    group: Group | None = None,
) -> inspect.Parameter:
    """An argument of the flat function: `hint` with its help and group."""
    kinds, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
    own = [note for note in notes if isinstance(note, Parameter)]
    said = {"help": help.replace("<", "\\<")} if help and not any(note.help for note in own) else {}
    placed = {"group": group} if group else {}
    numbers = {"converter": _whole} if _is_whole(kinds) else {}
    hidden = {} if default or default == 0 and default is not False else {"show_default": False}
    note = Parameter.combine(*own, Parameter(**said, **placed, **hidden, **numbers))  # type: ignore[arg-type]
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[_typed(kinds), note])


def _is_whole(kind: Any) -> bool:
    """Whether values of a type are whole numbers, one or several."""
    if kind is int:
        return True
    inner = [one for one in get_args(kind) if one not in (type(None), ...)]
    return bool(inner) and get_origin(kind) is not Literal and all(map(_is_whole, inner))


def _whole(kind: Any, tokens: Sequence[cyclopts.Token]) -> Any:
    """Whole numbers as they are written: cyclopts would round 1.5, and take 0x10."""
    found = []
    for token in tokens:
        if not re.fullmatch(r"[+-]?\d{1,30}", token.value):
            raise ValueError(f"{token.value[:40]!r} is no whole number")
        found.append(int(token.value))
    is_several = any(get_origin(one) is tuple for one in (kind, *get_args(kind)))
    return tuple(found) if is_several else found[0]


def _typed(kind: Any) -> Any:
    """The type that the command line reads for a type in Python: text for a name that also may be an object."""
    if get_origin(kind) in (Union, UnionType):
        some = [one for one in get_args(kind) if one is not type(None)]
        plain = [one for one in some if one in (int, float, str, bool, Path) or get_origin(one) in (Literal, tuple)]
        several = [one for one in plain if get_origin(one) is tuple]
        chosen = next(iter(several), None) or next((one for one in (str, Path) if one in plain), plain[0])
        return Union[chosen, None] if type(None) in get_args(kind) else chosen  # noqa: UP007  (may be text)
    return kind


def _with_json(arguments: Sequence[str]) -> list[str]:
    """The arguments with `--json=-` for `--json -` and for `--json` without a file: cyclopts takes - for a flag."""
    found: list[str] = []
    for word, after in zip(arguments, [*arguments[1:], "-"], strict=False):
        if word == "--json" and after.startswith("-"):
            found.append("--json=-")
        elif word != "-" or found[-1:] != ["--json=-"]:
            found.append(word)
    return found


@cache
def _read_docstring(described: Any) -> tuple[str, dict[str, str]]:
    """The summary in a docstring, and the help of each argument; a class has its parents' arguments, too."""
    summary, found = "", dict[str, str]()
    for kind in reversed(described.__mro__) if isinstance(described, type) else [described]:
        parsed = docstring_parser.parse(inspect.cleandoc(kind.__doc__ or ""), docstring_parser.DocstringStyle.GOOGLE)
        summary = "\n\n".join(filter(None, (parsed.short_description, parsed.long_description)))
        found |= {one.arg_name: " ".join((one.description or "").split()) for one in parsed.params}
    return summary.replace("<", "\\<"), found
