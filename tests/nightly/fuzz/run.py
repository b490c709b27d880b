"""The attack as a command: `python tests/nightly/fuzz/run.py --cases 5000 --table docs/results/reliability.md`.

`--parser NAME --case NUMBER --keep FOLDER` writes the files of one case, to look at.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as the command line, before torch is imported

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "helpers"))

import torch
from pages import read_table, save
from parsers import PARSERS
from runner import MEGABYTES, SECONDS, Tally, attack, case, write

_HEAD = f"""# Damaged files

Written by `make fuzz CASES={{cases}}`: {{total:,}} files in all. Each is a valid file, made by the harness, with one to
four faults by a seed: bits and lengths, numbers and floats at their limits, names of types, parts dropped, doubled,
swapped, renamed or taken from another file, also inside, where checksums and lengths are put right again; bytes that
are no text, deep nesting, code in pickles and YAML.

The tool may read such a file, if what is left of it makes sense, or refuse it by one line of text. All else is a fault:
another exception, the end of the process, a file that appears, {SECONDS:.0f} s of processor time, {MEGABYTES} MB of
memory.

| parser | cases | accepted | refused | faults | slowest, ms | peak, MB |
|---|---|---|---|---|---|---|
"""
_FOOT = """
`steps.csv` is never refused: rows that are none are left out, a table of other columns is begun anew with a warning.
Faults of processes, ranks, disks and folders are another attack: [faults.md](faults.md), by `make faults`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parser", action="append", choices=[each.name for each in PARSERS], help="default: all")
    parser.add_argument("--cases", type=int, default=200, help="of each parser")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [each for each in PARSERS if not args.parser or each.name in args.parser]
    if args.keep:
        write(case(chosen[0], chosen[0].valid(), args.case), args.keep)
        return 0
    faults = 0
    for each in chosen:
        tally = attack(each, range(args.first, args.first + args.cases))
        faults += len(tally.faults)
        print(_row(tally), *(f"{fault}\n" for fault in tally.faults), sep="", end="", flush=True)
        if args.table:
            _write(args.table, tally)
    return bool(faults)


def _write(table: Path, tally: Tally) -> None:
    """Put a row in its place; other rows stay, so that one parser can be tried again."""
    old = {row["parser"]: list(row.values())[1:] for row in read_table(table.with_suffix(".csv"))}
    rows = {name: f"| {' | '.join(cells)} |\n" for name, cells in old.items()} | {tally.parser: _row(tally)}
    kept = [rows[each.name] for each in PARSERS if each.name in rows]
    total = sum(int(row.split(" | ")[1].replace(",", "")) for row in kept)
    save(table, _HEAD.format(cases=tally.cases, total=total) + "".join(kept) + _FOOT)


def _row(tally: Tally) -> str:
    cells = (tally.parser, f"{tally.cases:,}", f"{tally.accepted:,}", f"{tally.refused:,}", len(tally.faults),
             f"{1000 * tally.seconds:.0f}", f"{tally.megabytes:.0f}")  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
