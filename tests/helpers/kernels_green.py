"""The hash of the CUDA engine's sources on which every kernel test passed: `make kernels` writes it when all passed.

Interpreting and compiling kernels takes most of a test run. If the sources have not changed since, one test in EVERY
runs, another choice for each commit.
"""

import ast
import hashlib
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zlib import crc32

EVERY = 16
ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "backends" / "cuda" / "kernels.sha256"
# The engine, its tests, and the code that they compare it with.
SOURCES = (
    *("swin_quant/backends/cuda", "swin_quant/backends/fastertransformer", "swin_quant/models/windows.py"),
    *("swin_quant/quant/fake_quant.py", "swin_quant/quant/quantizer.py", "tests/backends/cuda"),
    *("tests/helpers/interpreted.py", "tests/helpers/kernel_runs.py", "tests/helpers/compiled_kernels.py"),
)


def state():
    """SHA-256 of these modules' statements (without docstrings, comments and import paths) and of Triton's version.

    A statement that moves to another of these files changes nothing, nor does a message: a text with a space, except
    beside kernels, where such texts are PTX.
    """
    files = [file for source in SOURCES for file in _files(ROOT / source)]
    statements = {one for path in files for one in _statements(_parsed(path))}
    return hashlib.sha256("\n".join((_triton(), *sorted(statements))).encode()).hexdigest()


def _parsed(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and "kernels" not in path.relative_to(ROOT).parts and " " in str(node.value):
            node.value = "message"
    return tree


def _statements(tree):
    """Each top-level statement as text. Names imported from the package count only if they are renamed."""
    modules = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in _modules(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in modules:
            node.id = "module"
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [part for one in body if not _is_text(one) for part in _parts(one)]
    return [re.sub(r"swin_quant(\.\w+)+", "swin_quant", ast.dump(one)) for one in tree.body]


def _modules(node):
    """The names of an import that are modules of the package."""
    folder = ROOT / (node.module or "").replace(".", "/")
    return {one.asname or one.name for one in node.names if (folder / f"{one.name}.py").is_file()}


def _parts(node):
    """An import as one import a name; any other statement whole."""
    if not isinstance(node, ast.ImportFrom):
        return [node]
    if not (node.module or "").startswith("swin_quant"):
        return [ast.ImportFrom(node.module, [name], node.level) for name in node.names]
    return [ast.ImportFrom("swin_quant", [name], 0) for name in node.names if name.asname]


def _files(place):
    return [place] if place.is_file() else place.rglob("*.py")


def _is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _triton():
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def is_green():
    return os.environ.get("KERNELS") != "all" and FILE.is_file() and FILE.read_text().strip() == state()


def is_chosen(nodeid):
    """Whether a test is in this commit's sample."""
    return (crc32(nodeid.encode()) + int(os.environ.get("DRAWS") or 0)) % EVERY == 0


if __name__ == "__main__":
    if not _triton():
        sys.exit("Triton is not installed: no kernel was interpreted, and nothing is recorded")
    FILE.write_text(f"{state()}\n")
