"""A page of results in sections that several runs write, each replacing the one with its title; tables that are data;
and the conditions of figures."""

import csv
import io
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.versions import versions


def place(page: Path, heading: str, title: str, text: str) -> None:
    """Put a section under `## title` into the page; sections are sorted by title."""
    old = page.read_text() if page.exists() else ""
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in re.split(r"(?m)^## ", old)[1:]}
    sections[title] = text.strip()
    found = "".join(f"\n## {name}\n\n{body}\n" for name, body in sorted(sections.items()))
    atomic_write_bytes(page, (heading + found).encode())


def read_table(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by its first line; none without the file."""
    return list(csv.DictReader(io.StringIO(file.read_text()))) if file.exists() else []


def write_table(file: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    atomic_write_bytes(file, out.getvalue().encode())


def cpu() -> str:
    """The name of this CPU, which separates sections of times."""
    return str(versions().get("cpu") or "an unknown CPU")


def versions_here() -> str:
    """The versions that times and accuracy on a GPU depend on, in one line, and the date."""
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    return (
        f"driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}, triton {_installed('triton')}, "
        f"commit {commit}, {time.strftime('%F')}"
    )


def _first_line(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.partition("\n")[0].strip() if not said.returncode and said.stdout.strip() else "unknown"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
