"""Which sources of the CUDA engine every test of its kernels passed on: `make kernels` writes it, after all passed.

To interpret and to compile kernels takes most of a test run. Where nothing of them has changed since, one test in
EVERY runs, another choice for each commit.
"""

import ast
import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zlib import crc32

EVERY = 8
FILE = Path(__file__).resolve().parents[1] / "backends" / "cuda" / "kernels.sha256"
SOURCES = Path(__file__).resolve().parents[2] / "swin_quant" / "backends" / "cuda"


def state():
    """SHA-256 of what the engine's modules do (not their comments, texts for people, or imports), and of Triton's
    version."""
    try:
        digest = hashlib.sha256(version("triton").encode())
    except PackageNotFoundError:
        digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [one for one in body if not _says_nothing(one)]
        digest.update(f"{path.relative_to(SOURCES)} {ast.dump(tree)}".encode())
    return digest.hexdigest()


def _says_nothing(node):
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, ast.Import | ast.ImportFrom)


def is_green():
    return os.environ.get("KERNELS") != "all" and FILE.is_file() and FILE.read_text().strip() == state()


def is_chosen(nodeid):
    """Whether a test is in this commit's sample."""
    return (crc32(nodeid.encode()) + int(os.environ.get("DRAWS") or 0)) % EVERY == 0


if __name__ == "__main__":
    FILE.write_text(f"{state()}\n")
