"""One word for one thing, and nothing that is asked for is left out silently."""

import ast
from pathlib import Path

import pytest
from shown import PARSERS

import swin_quant.cli
from swin_quant.cli.session import FRONT_DOOR, command_of

FOLDER, FILES = ("DIR",), ("FILE",)
# What a flag takes, wherever a command has it.
MEANING = {"--output": FOLDER, "--data-path": FOLDER, "--json": FILES, "--checkpoint": FILES, "--pictures": ("N",),
           "--batch": ("N",), "--policy": ("NAME|FILE",), "--engine": ("NAME", None), "--to": FILES}  # fmt: skip
OURS = sorted(PARSERS.keys() - {FRONT_DOOR})
# What every command's session reads, and what it takes for the launcher's or the user's sake.
SESSION = {"help", "help_all", "verbose", "quiet", "local_rank", "device"}


def definitions(*paths):
    """Functions, methods and tables of modules by name, but for those that declare options: name -> nodes."""
    found = {}
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in [*tree.body, *(part for one in tree.body if isinstance(one, ast.ClassDef) for part in one.body)]:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("add_"):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign) and node in tree.body:
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, []).append(node.value)
    return found


def whole(path):
    """Fields of options that are handed on all at once."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and any(
            word in ast.unparse(node) for word in ("vars(self)", "getattr(self, name)")
        ):
            yield from (part.target.id for part in node.body if isinstance(part, ast.AnnAssign))


PACKAGE = Path(swin_quant.cli.__file__).parents[1]
SHARED = definitions(*PACKAGE.joinpath("cli").rglob("*.py"), *PACKAGE.joinpath("verbs").rglob("*.py"))


@pytest.mark.parametrize("command", OURS)
def test_a_flag_takes_the_same_in_all_commands(command):
    for action in PARSERS[command]._actions:
        for flag in set(action.option_strings) & MEANING.keys():
            assert action.metavar in MEANING[flag], (flag, action.metavar)


@pytest.mark.parametrize("command", sorted(set(OURS) - {"ft export"}))  # which is `export`
def test_every_option_is_read(command):
    """By the command's own file, or by what it calls of the command line's."""
    file = Path(command_of(command).__file__)
    own = definitions(file)
    todo, seen, read = [*own["run"]], {"run"}, SESSION.union(whole(file))
    while todo:
        for node in ast.walk(todo.pop()):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # of getattr, and of tables of options
            name = getattr(node, "id", getattr(node, "attr", None))
            if name not in seen:
                seen.add(name)
                todo += own.get(name, []) + [node for node in SHARED.get(name, []) if node not in own.get(name, [])]
    assert {action.dest for action in PARSERS[command]._actions} - read == set()
