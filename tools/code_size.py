"""Print the size of this repository: files and lines by folder, functions, commands, benchmarks, results.

    python tools/code_size.py [--trace]

--trace also counts the files of swin_quant whose functions are given the checkpoint in `calibrate`, and a picture in
`evaluate`: the path, an object that holds it, the picture's pixels, or a batch of them.
"""

import argparse
import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "swin_quant", ROOT / "tests"
CHECKPOINT = ROOT / "examples" / "checkpoints" / "swin_micro_cifar10.safetensors"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()  # of CIFAR-10
PIXELS = {(3, 32, 32), (32, 32, 3)}  # shapes of a picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="count the files that two commands enter")
    found = measure() | (trace() if parser.parse_args().trace else {})
    print("| what | count |\n|---|---:|", *(f"| {name} | {value} |" for name, value in found.items()), sep="\n")


def measure() -> dict[str, object]:
    """Counts by name, first the folders with files and lines."""
    groups = by_folder(PACKAGE) | by_folder(TESTS)
    found: dict[str, object] = {f"{name}: files, lines": f"{len(of):,}, {lines(of):,}" for name, of in groups.items()}
    functions = [length for file in PACKAGE.rglob("*.py") for length in function_lengths(file.read_text("utf-8"))]
    found |= {"functions of swin_quant": len(functions), "their median lines": int(statistics.median(functions))}
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
        calibrate = ["calibrate", str(CHECKPOINT), "--pictures", "2", "--policy", "qdq", *data]
        first = entered_by(calibrate, str(CHECKPOINT))
        second = entered_by(["evaluate", *map(str, Path(work).glob("*_calib.pth")), *data])
    return {"files entered by a checkpoint in `calibrate`": first, "by a picture in `evaluate`": second}


def is_followed(value: object, path: str, depth: int = 1) -> bool:
    """Whether a value is a path, pixels of a picture, or an object that holds one."""
    if isinstance(value, str | Path):
        return bool(path) and str(value) == path
    if (shape := getattr(value, "shape", None)) is not None or hasattr(value, "getpixel"):  # an image of PIL has none
        return not path and (shape is None or tuple(shape)[-3:] in PIXELS)
    return depth > 0 and any(is_followed(one, path, depth - 1) for one in getattr(value, "__dict__", {}).values())


def entered_by(words: list[str], path: str = "") -> int:
    """The number of files whose functions are given the path, or without one a picture."""
    from swin_quant.cli import main as run

    files: set[str] = set()

    def note(frame, event: str, _: object) -> None:  # type: ignore[no-untyped-def]
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}/") or code.co_filename in files:
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_followed(frame.f_locals.get(name), path) for name in given):
            files.add(code.co_filename)

    sys.setprofile(note)
    try:
        if code := run(words):
            sys.exit(f"swin-quant {words[0]} ended with {code}")
    finally:
        sys.setprofile(None)
    return len(files)


if __name__ == "__main__":
    main()
