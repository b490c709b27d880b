"""Time `swin-quant report` on many run cards, by number and form.

    python benchmarks/report.py [--cards 100 400 3000]

CPU seconds of the whole command, including its start, on as many cards in one folder. Each card has its own name,
checkpoint and footnotes: two float results, and two quantized ones.
"""

import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import script_parser

from swin_quant.cards.card import RunCard
from swin_quant.cards.records import Result

FORMS: dict[str, tuple[str, ...]] = {
    "terminal": (),
    "markdown": ("--format", "markdown"),
    "csv": ("--format", "csv"),
    "json": ("--json", "-"),
}
DATASET = {"name": "cifar10", "split": "val", "pictures": 5000, "sha256": "1" * 64}
FLOAT = Result("torch", "float32", None, DATASET, 5000, 80.0, 98.0, None, 32, "cpu", ms_per_picture=12.0)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--cards", type=int, nargs="+", default=(100, 400, 3000))
    args = parser.parse_args()
    print("| cards | " + " | ".join(FORMS) + " |\n" + "|---:" * (1 + len(FORMS)) + "|")
    for count in args.cards:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(count):
                Path(folder, f"{number}.json").write_text(json.dumps(card(number).to_dict()))
            seconds = [cpu_seconds(folder, flags) for flags in FORMS.values()]
        print(f"| {count} | " + " | ".join(f"{taken:.2f}" for taken in seconds) + " |", flush=True)


def card(number: int) -> RunCard:
    """One of many cards, which have only the data set in common."""
    quantized = dataclasses.replace(FLOAT, precision="int8", policy="qdq", acc1=79.0 - number / 1000)
    results = (
        FLOAT,
        dataclasses.replace(FLOAT, engine="openvino", ms_per_picture=3.0),
        dataclasses.replace(quantized, engine="torch fake-quant", note=f"remark {number}"),
        dataclasses.replace(quantized, engine="openvino", ms_per_picture=1.0 + number / 1000),
    )
    source = {"file": "x.pth", "sha256": f"{number:064x}", "format": "pth"}
    records = [dataclasses.asdict(result) for result in results]
    return RunCard(f"model_{number}", {}, {"size": 32}, source=source, results=records, versions={})


def cpu_seconds(folder: str, flags: tuple[str, ...]) -> float:
    """User and system seconds of the command in a new process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "swin_quant", "report", folder, *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
