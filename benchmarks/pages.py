"""What scripts share: their parser, their places, commands of ours, rows of tables; and pages of results.

A page has sections that several runs write, each replacing the one with its title, tables as data in a CSV beside it,
and the conditions of its figures.
"""

import argparse
import csv
import io
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.card import versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS, EXAMPLES = ROOT / "docs" / "results", ROOT / "examples" / "checkpoints"


def script_parser(docstring: str | None) -> argparse.ArgumentParser:
    """The parser of a script, whose `--help` shows its docstring as it is."""
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def swin_quant(*words: object) -> None:
    """Run a command of ours, with `--quiet`."""
    command = [sys.executable, "-m", "swin_quant", *map(str, words), "--quiet"]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def cifar10(folder: Path, split: str) -> Any:
    """The pictures of a split, from zip files and maps."""
    from swin_quant.data.sources import open_pictures

    return open_pictures(str(folder), split, zip_mode=True, num_classes=10)


def join_cells(cells: Iterable[object]) -> str:
    """A line of a pipe table."""
    return f"| {' | '.join(map(str, cells))} |"


def place(page: Path, title: str, text: str) -> None:
    """Put a section under `## title` into the page, whose heading stays; sections are sorted by title.

    Where the text begins with a table, what the page says above the section's table stays.
    """
    heading, *parts = re.split(r"(?m)^## ", page.read_text() if page.exists() else f"# {page.stem}\n\n")
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}
    said = re.split(r"(?m)^(?:\||Table: )", sections.get(title, ""))[0] if text.lstrip().startswith("|") else ""
    sections[title] = said + text.strip()
    found = "".join(f"\n## {name}\n\n{body}\n" for name, body in sorted(sections.items()))
    save(page, heading.rstrip() + "\n" + found)


def save(page: Path, text: str) -> None:
    """Write a page whose tables are rows of the CSV beside it, each named by its heading: `make site` renders them.

    The page gets a line that names the rows; such a line in `text` keeps those that are there.
    """
    data, title = page.with_suffix(".csv"), page.stem
    before, tables = read_table(data), dict[str, list[dict[str, str]]]()

    def apart(found: re.Match[str]) -> str:
        nonlocal title
        if found["title"]:
            title = found["title"]
        elif found["kept"]:
            tables[found["kept"]] = [row for row in before if row["table"] == found["kept"]]
        else:
            lines = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in found["table"].splitlines()]
            head, _, *rows = ([cell.strip().replace("\\|", "|") for cell in line] for line in lines)
            name = title if title not in tables else f"{title} ({sum(one.startswith(title) for one in tables) + 1})"
            tables[name] = [{"table": name, **dict(zip(head, row, strict=True))} for row in rows]
            return f"Table: [{data.name}]({data.name}) of {name}.\n"
        return found[0]

    kinds = r"^#+ (?P<title>.+)$|(?P<table>(?:^\|.*\n)+)|^Table: \[\S+\.csv\]\(\S+\.csv\) of (?P<kept>.+)\.$"
    written = re.sub(kinds, apart, text, flags=re.MULTILINE)
    page.parent.mkdir(parents=True, exist_ok=True)
    if rows := [row for table in tables.values() for row in table]:
        head: list[str] = []  # the columns of all tables in the order of each
        for row in rows:
            at = len(head)
            for key in reversed(row):  # a new column stands in front of the next that is known
                if key in head:
                    at = head.index(key)
                else:
                    head.insert(at, key)
        write_table(data, head, ([row.get(key, "") for key in head] for row in rows))
    atomic_write_bytes(page, written.encode())


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
    import torch

    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    triton = version("triton") if find_spec("triton") else "unknown"
    known = f"CUDA {torch.version.cuda}, torch {torch.__version__}, triton {triton}"
    return f"driver {driver}, {known}, commit {commit}, {time.strftime('%F')}"


def _first_line(*command: str) -> str:
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.partition("\n")[0].strip() if not said.returncode and said.stdout.strip() else "unknown"
