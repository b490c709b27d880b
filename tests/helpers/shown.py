"""The texts of documents and --help, and our commands in them."""

import ast
import functools
import re
from pathlib import Path

from swin_quant.cli.command import Command
from swin_quant.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PARSERS = {name: Command(name) for name in COMMANDS}
SCRIPTS = {"calibrate.py": ["calibrate"], "qat_finetune.py": ["finetune"]}
SCRIPTS["export_ft.py"] = ["export", "--for", "fastertransformer"]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FILES = [*DOCUMENTS, *sorted((ROOT / "swin_quant").rglob("*.py"))]


def place(path):
    """A file's name in the checkout."""
    return str(path.relative_to(ROOT))


@functools.cache
def texts(path):
    """[(line, text)] of a document, or of a module's string literals, with `{}` for each value of an f-string."""
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return [(1, content)]
    nodes = list(ast.walk(ast.parse(content)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            shown = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            found.append((node.lineno, shown))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append((node.lineno, node.value))
    return found


def command_and_words(line):
    """The command of ours at the start of a line, and the words after it; (None, ...) if there is none."""
    words = re.split(r"\s{2,}[(#]|\s#\s", line.strip())[0].split()
    for place, word in enumerate(words):
        if word in SCRIPTS:
            command, *implied = SCRIPTS[word]
            return command, [*implied, *words[place + 1 :]]
        if word in ("swin-quant", "swin_quant") and words[place + 1 :]:
            return words[place + 1], words[place + 2 :]
    return (words[0], words[1:]) if words and words[0] in PARSERS else (None, words)


def shell_lines(path):
    """Our commands in bash blocks and in the examples of --help, with continued lines joined."""
    if not re.search(r"EXAMPLES|```bash\n", path.read_text(encoding="utf-8")):
        return  # most modules: parsing them takes seconds
    for _, text in texts(path):
        is_example = text.startswith(("swin-quant ", "torchrun ")) and "\n" in text
        blocks = [text] if is_example else re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                command, words = command_and_words(line)
                if command and not line.startswith("#"):
                    yield command, words
