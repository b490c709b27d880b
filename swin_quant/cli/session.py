"""One run of one command: parse, join the other ranks, run."""

import argparse
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any, NoReturn

from swin_quant.base.errors import UsageError, command_lines, did_you_mean, memory_errors_named, offered, speaking
from swin_quant.cli.commands import COMMANDS
from swin_quant.cli.flags import add_flags, options_from

_MODELS = (".pth", ".pt", ".safetensors", ".ckpt", ".bin", ".onnx", ".engine", ".ts", ".cuda", ".json")
_HUBS = ("timm:", "hf:")
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # which argparse takes for a word


class Store(argparse._StoreAction):
    """As argparse's, except that a flag with several words adds to its earlier ones."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        if flag and self.nargs == "+" and before is not self.default:
            values = [*before, *values]
        super().__call__(parser, namespace, values, flag)


def apart(arguments: Sequence[str], actions: Sequence[argparse.Action]) -> list[str]:
    """The arguments, with each word of a flag of several words after that flag: `--policy=a --policy=b FILE`.

    Unchanged for a parser without positional arguments.
    """
    if all(action.option_strings for action in actions):
        return list(arguments)
    several = {flag: action for action in actions if action.nargs == "+" for flag in action.option_strings}
    found: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*found, word, *rest]
        words = list(_words(several[word], rest)) if word in several else []
        found += [f"{word}={one}" for one in words] or [word]
        del rest[: len(words)]
    return found


def _words(action: argparse.Action, rest: Sequence[str]) -> Iterator[str]:
    for number, word in enumerate(rest):
        is_flag = word.startswith("-") and word != "-" and " " not in word and not _NUMBER.fullmatch(word)
        if is_flag or (number and _ends(str(action.metavar), number, word)):
            return
        yield word


def _ends(metavar: str, number: int, word: str) -> bool:
    """Whether a later word of a flag is a file of its own: by its ending, or because it exists."""
    if metavar == "KEY VALUE" and number % 2 or "=" in metavar and "=" in word:
        return False
    if word.endswith(_MODELS) or word.startswith(_HUBS):
        return True
    takes_files = metavar in ("FILE", "PLACE") or "FILE" in metavar and word.endswith((".yaml", ".yml"))
    return not takes_files and os.path.exists(word) and (os.path.isfile(word) or os.sep in word)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that shows a flag of several words as `--engine NAME ...`, most of which fit beside their explanation, and
    texts and examples within the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Indented lines are examples, with a remark in brackets behind some; the rest are paragraphs."""
        lines: list[str] = []
        text = re.sub(r"\n {8,}\(", "   (", re.sub(r" \\\n +", " ", text))  # lines that the source had to break
        for is_example, block in groupby(text.splitlines(), lambda line: line.startswith("  ") or not line):
            for line in block if is_example else textwrap.wrap(" ".join(block), width):
                lines += [line] if len(line) <= width else _example(line.strip(), width - 2)
        return "".join(f"{indent}{line}\n" for line in lines)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        (word,) = self._metavar_formatter(action, default_metavar)(1)
        shown = {"+": f"{word} ...", "*": f"[{word} ...]"}
        return shown.get(str(action.nargs)) or super()._format_args(action, default_metavar)


def _example(line: str, width: int) -> list[str]:
    """A long example: the command in lines that a shell joins, its remark below."""
    command, _, remark = re.sub(r" {2,}(?=\()", "\n", line).partition("\n")
    return [f"  {one}" for one in (*command_lines(command, width), *([f"    {remark}"] if remark else []))]


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and which takes no abbreviated flags."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("action", None, Store)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. UsageError if they cannot be parsed."""
        for word in arguments:
            if re.fullmatch(r"--[\w-]+=--", word):  # argparse turns it into an empty list
                self.error(f"argument {word[:-3]}: expected one argument")
        flags = (word.split("=")[0] for word in arguments if re.match("--[a-z]", word))
        if unknown := [flag for flag in flags if flag not in self._option_string_actions]:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")  # before missing ones: this may be a typo of one
        args = self.parse_args(apart(arguments, self._actions))
        if len(getattr(args, "ways", ())) > 1:  # reported after unknown flags
            self.error("CHECKPOINT and --checkpoint are the same: give one of them")
        return args

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stdout).write(message)  # argparse would hide that it cannot be written

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._near(message)}; see {self.prog} --help")

    def _near(self, message: str) -> str:
        """A hint for an unknown flag, or for a value that is not among the choices."""
        if flag := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            return did_you_mean(flag[1], self._option_string_actions)
        if value := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
            return did_you_mean(value[1], re.findall(r"[\w-]+", value[2]))
        return ""


def command_of(name: str) -> ModuleType:
    """The module of a command: its docstring, EXAMPLES, dataclass of options and `run(options, world)`.

    A `run(options)` is for the first rank alone.
    """
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r:.60}{offered(name, COMMANDS)}")
    return importlib.import_module(f"swin_quant.verbs.{re.sub('[- ]', '_', name)}")


def options_of(command: ModuleType) -> type:
    """The dataclass of a command's options: the one that its `run` is annotated with."""
    kind: type = getattr(command, command.run.__annotations__["options"])
    return kind


def parser_of(name: str, command: ModuleType, rare: bool = False) -> _Parser:
    """The parser of a command's arguments; `rare`: its help includes rare flags."""
    parser = _Parser(
        prog=f"swin-quant {name}",
        description=command.__doc__,
        epilog=command.EXAMPLES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add_flags(parser, options_of(command), getattr(command, "WORDS", {}), rare)
    parser.add_argument("--help-all", action="store_true", help="show this message with the flags that few need")
    parser.add_argument("--verbose", action="store_true", help="more messages, and tracebacks of errors")
    parser.add_argument("--quiet", action="store_true", help="only results, warnings and errors")
    parser.usage = _usage_of(parser)
    return parser


def _usage_of(parser: argparse.ArgumentParser) -> str:
    """The usage line: required and positional arguments alone, since every option is explained below it."""
    needed = [action for action in parser._actions if action.required or not action.option_strings]
    formatter = parser._get_formatter()
    formatter.add_usage(None, needed, [], prefix="")
    words = " ".join(formatter.format_help().split())
    usage = f"usage: {parser.prog} [options]{words.removeprefix(parser.prog)}"
    lines = textwrap.wrap(
        usage, formatter._width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).removeprefix("usage: ")


def words_of(parser: argparse.ArgumentParser, command: ModuleType) -> dict[str, str]:
    """Field of the library's messages -> the word of this command: its flag, unless the command's FIELDS rename it."""
    words: dict[str, str] = {}
    for action in parser._actions:
        for flag in action.option_strings:
            words |= {flag.lstrip("-").replace("-", "_"): flag, action.dest: flag}
    return words | getattr(command, "FIELDS", {})


def run(name: str, arguments: Sequence[str]) -> int:
    """Run command `name` and return 0; errors are raised."""
    command = command_of(name)
    if "--help-all" in arguments:
        parser_of(name, command, rare=True).print_help()
        return 0
    parser = parser_of(name, command)
    args = parser.parse(arguments)

    from swin_quant.base import progress
    from swin_quant.base.distributed import process_group, rank_of_launcher
    from swin_quant.base.files import check_writable

    if (json := getattr(args, "json", None)) not in (None, "-"):
        check_writable(json)
    progress.set_up(args.verbose, args.quiet, rank_of_launcher())
    with speaking(words_of(parser, command)):
        with process_group(getattr(args, "device", "cpu"), getattr(args, "local_rank", None)) as world:
            with memory_errors_named():
                options: Any = options_from(args, options_of(command))
                if "world" in command.run.__annotations__:
                    command.run(options, world)
                elif world.is_main:
                    command.run(options)
            sys.stdout.flush()  # flushed before this rank waits for the other ranks
    return 0
