"""Imports go one way, floor by floor: higher modules may use lower ones, never the other way round."""

import ast
import functools
import re
from pathlib import Path

import pytest

from swin_quant.backends.registry import BUILT_IN
from swin_quant.cli.commands import COMMANDS

PACKAGE = Path(__file__).resolve().parents[1] / "swin_quant"
FLOORS = [
    ["base"],
    ["config", "cards"],
    ["data", "quant"],
    ["models", "checkpoint"],
    ["score", "operators"],
    ["backends", "train"],
    ["report", "ship", "serving"],
    ["model", "arguments"],
    ["wrapping"],
    ["loading"],
    ["exported"],
    ["policies"],
    ["verbs"],
    ["cli"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


MODULES = {
    ".".join(("swin_quant", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
OWN_NAME = re.compile(r"(swin_quant(?:\.\w+)+)(?::\w+)?")


@functools.cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def imported(path):
    """(line, our module) for every import in a file, including those inside functions and for types only."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "swin_quant":
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name if name in MODULES else node.module) for name in inner)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in MODULES)


def named(path):
    """(line, our module) for every text that names a module to import, as in registries."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (name := OWN_NAME.fullmatch(node.value)) and name[1] in MODULES:
                yield node.lineno, name[1]


@pytest.fixture(scope="module")
def imports():
    return {name: sorted(set(imported(path))) for name, path in MODULES.items()}


def floor_of(module):
    """(package, its floor); the package's own `__init__`, which exports everything, is above all."""
    package = module.split(".")[1] if "." in module else "swin_quant"
    return package, FLOOR.get(package, len(FLOORS))


def test_every_package_has_a_floor():
    parts = {path.stem for path in PACKAGE.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"}
    assert parts - {"__init__", "__main__"} == set(FLOOR)


def test_no_arrow_goes_up_or_aside(imports):
    wrong = [
        f"{MODULES[name].relative_to(PACKAGE)}:{line} imports {module}"
        for name, needs in imports.items()
        for line, module in {*needs, *named(MODULES[name])}
        for (package, own), (other, floor) in [(floor_of(name), floor_of(module))]
        if package in FLOOR and package != other and floor >= own
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle(imports):
    """A module is removed once all its imports are removed; the rest is in a circle, or leads to one."""
    left = {
        name: {module for _, module in needs if module != name}
        for name, needs in imports.items()
        if floor_of(name)[0] != "swin_quant"
    }
    while gone := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in gone:
            del left[name]
    assert left == {}


def test_no_two_classes_have_one_name():
    where = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: sorted(paths) for name, paths in where.items() if len(paths) > 1} == {}


def test_only_what_is_for_swin_knows_swin():
    """The registry distinguishes architectures: other modules import parts of Swin nowhere."""
    parts = re.compile(r"swin_quant\.models\.(layers|swin|swin_v2|windows|geometry)\b")
    for_swin = {"models", "backends/cuda", "backends/fastertransformer", "backends/onnx/swin", "verbs/show.py"}
    know = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if parts.search(path.read_text())}
    assert [path for path in sorted(know) if not any(path.startswith(place) for place in for_swin)] == []


def test_backends_do_not_import_each_other():
    """Shared code is beside their folders."""
    own = {name: re.compile(rf"swin_quant\.backends\.(?!{name}\b)({'|'.join(BUILT_IN)})\b") for name in BUILT_IN}
    sources = {path: path.read_text() for name in BUILT_IN for path in (PACKAGE / "backends" / name).rglob("*.py")}
    strange = {path: own[path.relative_to(PACKAGE).parts[1]].search(text) for path, text in sources.items()}
    assert [f"{path.relative_to(PACKAGE)}: {found[0]}" for path, found in strange.items() if found] == []


def test_the_exporter_of_onnx_knows_no_architecture():
    """Each architecture names its rewriter: only the rewriters' own files import their folders."""
    core = (PACKAGE / "backends" / "onnx").glob("*.py")
    assert [path.name for path in core if re.search(r"backends\.onnx\.swin", path.read_text())] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_one_file(command):
    assert PACKAGE.joinpath("verbs", f"{re.sub('[- ]', '_', command)}.py").is_file()
