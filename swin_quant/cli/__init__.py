"""The command line: one module a command, found by name and imported only when the command is called."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from swin_quant.base import __version__
from swin_quant.base.cpu import reproducible
from swin_quant.base.errors import UsageError, offered
from swin_quant.cli.commands import COMMANDS, FRONT_DOOR, SECTIONS

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ stack dumps add nothing to our one line
_WIDE = 140  # columns of help in a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    reproducible()
    try:
        from swin_quant.cli.guard import guarded

        return guarded(lambda: _main(arguments), "--verbose" in arguments)
    except KeyboardInterrupt:  # before or after our handler was set
        print("error: interrupted", file=sys.stderr)
        return 130


def _main(arguments: Sequence[str]) -> int:
    if list(arguments[:1]) == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0].startswith(("--local-rank=", "--local_rank=")):  # torch.distributed.launch puts it first
        arguments = [*arguments[1:2], arguments[0], *arguments[2:]]
    if list(arguments[:2]) == FRONT_DOOR.split():
        from swin_quant.cli import front_door

        return front_door.run(arguments[2:])
    name = arguments[0]
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r:.60}{offered(name, COMMANDS)}")
    from swin_quant.cli.command import run

    return run(name, arguments[1:])


def _usage() -> str:
    width, columns = max(map(len, COMMANDS)), shutil.get_terminal_size((_WIDE, 0)).columns
    indent, lines = " " * (width + 4), []
    for title, commands in SECTIONS.items():
        entries = (f"  {name:<{width}}  {meaning}" for name, meaning in commands.items())
        lines += [f"{title}:", *(textwrap.fill(one, columns, subsequent_indent=indent) for one in entries), ""]
    about = "swin-quant: Swin Transformer V1 and V2 to INT8, with accuracy that was measured"
    usage = "usage: swin-quant COMMAND [options]      swin-quant COMMAND --help      swin-quant --version"
    return "\n".join([about, "", usage, "", *lines[:-1]])
