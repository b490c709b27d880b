"""Files as people have them, before and after: writes docs/results/given.md.

    python benchmarks/given.py --data-path DIR [--before CHECKOUT] [--case NAME ...] [--work W]

DIR is CIFAR-10 as zip files and maps; 320 of its training and 500 of its validation pictures are put into folders of
classes. Each case (benchmarks/given_cases.py) runs in a process and a folder of its own, by the package of this
checkout, and with `--before` by that of another one, of an older commit; a row names both commits. Warnings count as
said: a case shows the last. Rows of other cases stay as they are.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import RESULTS, ROOT, cifar10, join_cells, place, read_table, script_parser

PAGE = RESULTS / "given.md"
HEAD = ["kind", "case", "before", "after", "commits"]
CASES = ROOT / "benchmarks" / "given_cases.py"
COUNTS = {"train": 320, "val": 500}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data-path", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit")
    parser.add_argument("--case", nargs="+", help="these alone")
    parser.add_argument("--work", type=Path, default=Path("out/given"))
    args = parser.parse_args()
    from given_cases import CASES as known

    pictures = make_folders(args.data_path, args.work / "pictures")
    trees = [tree for tree in (args.before, ROOT) if tree]
    commits = " to ".join(map(commit, trees))
    rows = {row["case"]: [row[key].replace("|", "\\|") for key in HEAD] for row in read_table(PAGE.with_suffix(".csv"))}
    for name in args.case or known:
        kind, text, _ = known[name]
        found = [outcome(name, tree.resolve(), pictures) for tree in trees]
        rows[text] = [kind, text, *[""] * (2 - len(found)), *found, commits]
        print(" | ".join(rows[text]), flush=True)
        shown = [HEAD, ["---"] * len(HEAD), *(rows[text] for _, text, _ in known.values() if text in rows)]
        place(PAGE, "Cases", "\n".join(map(join_cells, shown)))  # a run may be cut off


def make_folders(data: Path, target: Path) -> Path:
    """Pictures in folders named by class, spread evenly over the classes."""
    for split, count in COUNTS.items():
        if (target / split).exists():
            continue
        pictures = cifar10(data, split)
        names = (data / "classes.txt").read_text().split()
        left = dict.fromkeys(range(10), count // 10)
        for index, label in enumerate(pictures.labels):
            if left[label]:
                left[label] -= 1
                file = target / split / names[label] / f"{left[label]:04}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                pictures.read(index).save(file)
    return target.resolve()


def outcome(name: str, tree: Path, pictures: Path) -> str:
    """The outcome of a case with the package in `tree`, without the paths of this run."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, str(CASES), name, folder, str(pictures)]
        done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=folder, timeout=1800)
        lines = done.stdout.splitlines()
        found = json.loads(lines[-1])["outcome"] if lines else f"ended with {done.returncode}"
        warned = [line for line in done.stderr.splitlines() if re.match(r"\W*warning", line, re.I)]
        said = "; ".join([found, *(line.strip() for line in warned[-1:])])
        for place, word in ((folder, ""), (str(pictures), "PICTURES"), (str(tree), ""), (str(ROOT), "")):
            said = said.replace(f"{place}/", "").replace(place, word or "DIR")
    said = re.sub(r"\s+", " ", said)
    return (said if len(said) <= 240 else f"{said[:240].rsplit(' ', 1)[0]} ...").replace("|", "\\|")


def commit(tree: Path) -> str:
    run = ["git", "-C", str(tree), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
