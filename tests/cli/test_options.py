"""Each flag means the same in every command, and no option that is set is silently ignored."""

import ast
from pathlib import Path

import pytest
from shown import PARSERS

import swin_quant.cli
from swin_quant.cli.session import FRONT_DOOR, command_of

FOLDER, FILES = ("DIR",), ("FILE",)
# The value of a flag, in every command that has it.
MEANING = {"--output": FOLDER, "--data-path": FOLDER, "--json": FILES, "--checkpoint": FILES, "--pictures": ("N",),
           "--batch": ("N",), "--policy": ("NAME|FILE",), "--engine": ("NAME", None), "--to": FILES}  # fmt: skip
OURS = sorted(PARSERS.keys() - {FRONT_DOOR})
# Options that every command's session reads, or accepts for the launcher's or the user's sake.
SESSION = {"help", "help_all", "verbose", "quiet", "local_rank", "device"}


def definitions(*paths):
    """Functions, methods and tables of modules by name, except those that declare options: name -> nodes."""
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
    """Yield the fields of options that are passed on all at once."""
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


@pytest.mark.parametrize("command", sorted(set(OURS) - {"ft export"}))  # the same as `export`
def test_every_option_is_read(command):
    """The command's own file reads it, or a function that it calls in the command line's package does."""
    file = Path(command_of(command).__file__)
    own = definitions(file)
    todo, seen, read = [*own["run"]], {"run"}, SESSION.union(whole(file))
    while todo:
        for node in ast.walk(todo.pop()):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # names in getattr and in tables of options
            name = getattr(node, "id", getattr(node, "attr", None))
            if name not in seen:
                seen.add(name)
                todo += own.get(name, []) + [node for node in SHARED.get(name, []) if node not in own.get(name, [])]
    assert {action.dest for action in PARSERS[command]._actions} - read == set()
