"""Print the script by which a shell completes our commands and flags (by shtab, extra `completion`)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated, Literal

from swin_quant.base.extras import library
from swin_quant.cli.flags import Flag, add_flags

EXAMPLES = """examples:
  swin-quant completion bash > ~/.local/share/bash-completion/completions/swin-quant
  swin-quant completion zsh > ~/.zfunc/_swin-quant"""


@dataclass(frozen=True)
class CompletionOptions:
    """The shell to write a completion for."""

    shell: Annotated[Literal["bash", "zsh", "tcsh"], Flag(place=True)]


def run(options: CompletionOptions) -> None:
    print(library("shtab", "completion").complete(whole_parser(), options.shell))


def whole_parser() -> argparse.ArgumentParser:
    """All commands as one parser, groups as commands of commands."""
    from swin_quant.cli.commands import COMMANDS, GROUPS
    from swin_quant.cli.session import command_of, options_of

    parser = argparse.ArgumentParser(prog="swin-quant")
    places = {"": parser.add_subparsers()}
    for group in sorted(GROUPS):
        places[group] = places[""].add_parser(group, help=f"commands of {group}").add_subparsers()
    for name, meaning in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        add_flags(places[group].add_parser(last, help=meaning), options_of(command_of(name)))
    return parser
