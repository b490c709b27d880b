"""Print the size of this repository: files and lines by folder, functions, commands, benchmarks, results.

    python tools/code_size.py [--trace]

--trace also counts the files of swin_quant that `calibrate` and `evaluate` of a micro checkpoint enter on noise, by
`sys.setprofile`, from the first entry into the folder of `STARTS` on.
"""

import argparse
import ast
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "swin_quant", ROOT / "tests"
CHECKPOINT = ROOT / "examples" / "checkpoints" / "swin_micro_cifar10.safetensors"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()  # of CIFAR-10
STARTS = {"calibrate": "verbs/", "evaluate": "data/"}  # entering the first file there starts the count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="count the files that two commands enter")
    args = parser.parse_args()
    found = measure() | (trace() if args.trace else {})
    print("| what | count |\n|---|---:|", *(f"| {name} | {value} |" for name, value in found.items()), sep="\n")


def measure() -> dict[str, object]:
    """Counts by name, first the folders with files and lines."""
    groups = by_folder(PACKAGE) | by_folder(TESTS)
    found: dict[str, object] = {
        f"{folder}: files, lines": f"{len(files):,}, {lines(files):,}" for folder, files in groups.items()
    }
    functions = [length for file in PACKAGE.rglob("*.py") for length in function_lengths(file.read_text("utf-8"))]
    found["functions of swin_quant"] = len(functions)
    found["their median lines"] = int(statistics.median(functions))
    sys.path.insert(0, str(ROOT))
    from swin_quant.cli.commands import COMMANDS

    found["commands"] = len(COMMANDS)
    scripts = list((ROOT / "benchmarks").glob("*.*"))
    found["benchmarks: files, lines"] = f"{len(scripts)}, {lines(scripts):,}"
    results = [file.suffix for file in (ROOT / "docs" / "results").iterdir()]
    found["docs/results: files, pages"] = f"{len(results)}, {results.count('.md')}"
    return found


def by_folder(top: Path) -> dict[str, list[Path]]:
    """The Python files below a folder: of all, then by its direct subfolder ("." for its own files)."""
    files = sorted(top.rglob("*.py"))
    groups: dict[str, list[Path]] = {top.name: files}
    for file in files:
        parts = file.relative_to(top).parts
        groups.setdefault(f"{top.name}/{parts[0] if len(parts) > 1 else '.'}", []).append(file)
    return groups


def lines(files: list[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def function_lengths(source: str) -> Iterator[int]:
    """Lines of each function and method, without its decorators."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def trace() -> dict[str, int]:
    """The number of files of swin_quant that each command enters."""
    import numpy as np
    from PIL import Image

    with TemporaryDirectory() as work:
        for split, name in ((split, name) for split in ("train", "val") for name in CLASSES):
            folder = Path(work, "pictures", split, name)
            folder.mkdir(parents=True)
            pixels = np.random.default_rng(len(name)).integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "1.png")
        data = ["--data-path", f"{work}/pictures", "--quiet", "--output", work]
        calibrate = ["calibrate", str(CHECKPOINT), "--pictures", "2", "--policy", "qdq", "--no-eval", *data]
        entered = {"calibrate": entered_by(calibrate)}
        (made,) = Path(work).glob("*_calib.pth")
        entered["evaluate"] = entered_by(["evaluate", str(made), *data])
    return {f"files entered by `{name}`": len(files) for name, files in entered.items()}


def entered_by(words: list[str]) -> Counter[str]:
    """Calls by file of swin_quant, without modules, from the first one below the folder of STARTS on."""
    from swin_quant.cli import main as run

    calls: Counter[str] = Counter()

    def note(frame, event: str, _: object) -> None:  # type: ignore[no-untyped-def]
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(f"{PACKAGE}/") and frame.f_code.co_name != "<module>":
            inside = name.removeprefix(f"{PACKAGE}/")
            if calls or inside.startswith(STARTS[words[0]]):
                calls[inside] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        code = run(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    if code:
        sys.exit(f"swin-quant {words[0]} ended with {code}")
    return calls


if __name__ == "__main__":
    main()
