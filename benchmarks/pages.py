"""What scripts share: their parser, their places, commands of ours, rows of tables; and pages of results.

A page has sections that several runs write, each replacing the one with its title, tables as data in a CSV beside it,
and the conditions of its figures.
"""

import argparse
import csv
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from swin_quant.base.files import atomic_write_bytes
from swin_quant.cards.card import versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS, EXAMPLES = ROOT / "docs" / "results", ROOT / "examples" / "checkpoints"
HEADING = "# Models of timm, torchvision and transformers\n"  # of any_model.md


def script_parser(docstring: str | None) -> argparse.ArgumentParser:
    """The parser of a script, whose `--help` shows its docstring as it is."""
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def swin_quant(*words: object, returned: bool = False) -> str:
    """Run a command of ours, with `--quiet`; its output is printed or, if wanted, `returned`."""
    command = [sys.executable, "-m", "swin_quant", *map(str, words), "--quiet"]
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE if returned else None, text=True).stdout


def float_model(config: Path, weights: Path) -> tuple[Any, Any]:
    """The tree of a config, and its model with the weights of a float checkpoint."""
    from swin_quant.checkpoint import load_float
    from swin_quant.config import load_config
    from swin_quant.models import build_model

    cfg = load_config(config)
    model = build_model(cfg)
    load_float(model, weights)
    return cfg, model


def cifar10(folder: Path, split: str) -> Any:
    """The pictures of a split, from zip files and maps."""
    from swin_quant.data.sources import open_pictures

    return open_pictures(str(folder), split, zip_mode=True, num_classes=10)


def batches_of(pictures: Any, cfg: Any, indices: Sequence[int], size: int) -> list[Any]:
    """Batches of the pictures with these indices, prepared as the config says."""
    from swin_quant.data.loader import load_batches
    from swin_quant.data.preprocess import Preprocess
    from swin_quant.data.sampling import chunks

    return list(load_batches(pictures, Preprocess.from_config(cfg), chunks(indices, size)))


def in_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, all of a round in turns: what slows the machine down slows all alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return taken


def older_cpu(folder: Path, kind: str) -> dict[str, str]:
    """The environment that imitates an older CPU, for all libraries of a process.

    OSError or CalledProcessError where the library for it cannot be built, or does not work.
    """
    source, library = ROOT / "tests" / "standin" / "older_cpu.c", (folder / "older_cpu.so").resolve()
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    environment = {"OLDER_CPU": kind, "LD_PRELOAD": str(library)}
    subprocess.run(["true"], env=os.environ | environment, check=True)
    return environment


def line_of(cells: Iterable[object]) -> str:
    """A line of a pipe table."""
    return f"| {' | '.join(map(str, cells))} |"


def place(page: Path, heading: str, title: str, text: str) -> None:
    """Put a section under `## title` into the page; sections are sorted by title."""
    old = page.read_text() if page.exists() else ""
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in re.split(r"(?m)^## ", old)[1:]}
    sections[title] = text.strip()
    found = "".join(f"\n## {name}\n\n{body}\n" for name, body in sorted(sections.items()))
    save(page, heading + found)


_PARTS = re.compile(
    r"^#+ (?P<title>.+)$|(?P<table>(?:^\|.*\n)+)|^Table: \[\S+\.csv\]\(\S+\.csv\) of (?P<kept>.+)\.$", re.MULTILINE
)


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
            head, _, *rows = map(_cells, found["table"].splitlines())
            name = title if title not in tables else f"{title} ({sum(one.startswith(title) for one in tables) + 1})"
            tables[name] = [{"table": name, **dict(zip(head, row, strict=True))} for row in rows]
            return f"Table: [{data.name}]({data.name}) of {name}.\n"
        return found[0]

    written = _PARTS.sub(apart, text)
    page.parent.mkdir(parents=True, exist_ok=True)
    if rows := [row for table in tables.values() for row in table]:
        head = _merged(list(row) for row in rows)
        write_table(data, head, ([row.get(key, "") for key in head] for row in rows))
    atomic_write_bytes(page, written.encode())


def _merged(heads: Iterable[Sequence[str]]) -> list[str]:
    """The columns of all tables in the order of each: a new one stands in front of the next that is known."""
    merged: list[str] = []
    for head in heads:
        at = len(merged)
        for key in reversed(head):
            if key in merged:
                at = merged.index(key)
            else:
                merged.insert(at, key)
    return merged


def _cells(line: str) -> list[str]:
    """The cells of a line of a pipe table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


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
