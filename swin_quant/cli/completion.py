"""swin-quant completion."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swin_quant.base.distributed import World

SHELLS = ("bash", "zsh", "tcsh")
HELP = "Print what makes a shell complete our commands and flags (by shtab, extra `completion`)."
EXAMPLES = """examples:
  swin-quant completion bash > ~/.local/share/bash-completion/completions/swin-quant
  swin-quant completion zsh > ~/.zfunc/_swin-quant"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace, world: World) -> None:
    from swin_quant.base.extras import library

    print(library("shtab", "completion").complete(whole_parser(), args.shell))


def whole_parser() -> argparse.ArgumentParser:
    """All commands as one parser, groups as commands of commands."""
    from swin_quant.cli import COMMANDS, GROUPS
    from swin_quant.cli.flags import add_flags
    from swin_quant.cli.session import command_of

    parser = argparse.ArgumentParser(prog="swin-quant")
    places = {"": parser.add_subparsers()}
    for group in sorted(GROUPS):
        places[group] = places[""].add_parser(group, help=f"commands of {group}").add_subparsers()
    for name, meaning in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        command, place = command_of(name), places[group].add_parser(last, help=meaning)
        if hasattr(command, "OPTIONS"):
            add_flags(place, command.OPTIONS)
        else:
            command.add_arguments(place)
    return parser
