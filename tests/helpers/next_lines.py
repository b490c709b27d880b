"""The commands behind `next:` in what a command printed: parsed, with the files that they name."""

import re
import shlex
from pathlib import Path

from swin_quant.cli.command import Command

_NEXT = re.compile(r"^next: +(.*?(?:\\\n +.*?)*)$", re.MULTILINE)
FOLDER = "DIR"  # the pictures of a user whom nobody asked for them


def next_commands(printed):
    """The words of each command; one of several lines is joined as a shell would."""
    return [shlex.split(found.replace("\\\n", "")) for found in _NEXT.findall(printed)]


def check_next_lines(printed):
    """Every next command of ours parses, and its file is there."""
    for program, *words in next_commands(printed):
        if program != "swin-quant":
            continue
        parsed = Command(words[0]).parse(words[1:])
        assert parsed and Path(words[1]).exists(), words
