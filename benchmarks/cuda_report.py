"""The page of `cuda_engine.py` and its data, from which a later run on the same GPU with the same sources goes on."""

import hashlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from cuda_candidates import LAUNCHES, PLAIN, Job, Timed
from pages import ROOT, line_of

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import read_json, write_json
from swin_quant.base.schema import checked

NAME = "cuda_engine"
SOURCES = (
    *("swin_quant/backends", "swin_quant/models", "swin_quant/quant", "configs/machines"),
    *("benchmarks/cuda_candidates.py", "benchmarks/cuda_timing.py"),
)
COMPILED, TUNED = "compile fp16", "max-autotune fp16"
TORCH = (TUNED, COMPILED, "max-autotune bf16", "torchao int8", "torchao fp8", "trace fp16", "eager fp16")


@dataclass
class Row:
    """A network and a batch: milliseconds by candidate, and the int8 list's plan if the GPU is known."""

    model: str
    batch: int
    ms: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    operations: int = 0
    floor_ms: float | None = None


class Saved(TypedDict):
    """The file: the conditions of its times, the days of its runs, and results by job name."""

    made_with: dict[str, str]
    runs: list[str]
    rows: list[Row]
    launches: dict[str, list[str]]
    failed: dict[str, str]
    notes: dict[str, str]
    not_reached: list[str]


@dataclass
class Report:
    """The content of the files. `made_with`: all that a time depends on; `runs`: days of runs that measured."""

    heading: list[str]
    rows: dict[tuple[str, int], Row]
    made_with: dict[str, str] = field(default_factory=dict)
    launches: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    measured: bool = False

    def go_on(self, folder: Path) -> str:
        """Take over earlier runs' results, with a message; a file for other conditions is put aside."""
        file = folder / f"{NAME}.json"
        if not file.is_file():
            return f"{file}: there is none, everything is measured"
        try:
            saved: Saved = checked(Saved, read_json(file, "report"), str(file))
            other = [key for key, value in self.made_with.items() if saved["made_with"].get(key) != value]
            said = f"is of other {', '.join(other)}" if other else ""
        except SwinQuantError as error:
            said = str(error)
        if said:
            before = f"{NAME}.{time.strftime('%Y%m%d-%H%M%S', time.localtime(file.stat().st_mtime))}"
            for ending in (".json", ".md"):
                if (folder / f"{NAME}{ending}").exists():
                    os.replace(folder / f"{NAME}{ending}", folder / f"{before}{ending}")
            return f"{file}: {said}: everything is measured anew, and it is kept as {before}.json"
        for row in saved["rows"]:
            self.rows.setdefault((row.model, row.batch), row).ms.update(row.ms)
        self.launches, self.failed, self.notes = saved["launches"], saved["failed"], saved["notes"]
        self.runs = saved["runs"]
        return f"{file}: {sum(len(row.ms) for row in saved['rows'])} times of {len(saved['runs'])} runs are kept"

    def open(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs without a result; jobs that failed before come last."""
        left = [job for job in jobs if not self._has(job)]
        return sorted(left, key=lambda job: named(job) in self.failed)

    def _has(self, job: Job) -> bool:
        done = named(job) in self.launches
        return done if job.candidate in LAUNCHES else job.candidate in self.rows[job.model, job.batch].ms

    def add(self, job: Job, timed: Timed) -> None:
        """Add a result, replacing an earlier one."""
        if not self.measured:
            self.measured = True
            self.runs.append(time.strftime("%F"))
        name = named(job)
        self.failed.pop(name, None)
        self.notes.pop(name, None)
        if timed.note:
            self.notes[name] = timed.note
        if timed.lines:
            self.launches[name] = list(timed.lines)
            return
        times = self.rows[job.model, job.batch].ms
        times[job.candidate] = timed.ms
        if timed.plain_ms is not None:
            times[PLAIN[job.candidate]] = timed.plain_ms

    def write(self, folder: Path, left: Sequence[Job]) -> str:
        """Write the page and its data, and return the page; `left` was not reached."""
        failed = ["## Failed\n", *(f"* {name}: {why}" for name, why in self.failed.items()), ""] if self.failed else []
        unreached = [named(job) for job in left if named(job) not in self.failed]
        missing = ["## Not reached in time\n", *(f"* {name}" for name in unreached), ""] if unreached else []
        notes = [f"* {name}: {note}" for name, note in self.notes.items()]
        runs = f"Measured in {len(self.runs)} run{'s' * (len(self.runs) != 1)}: {', '.join(self.runs)}."
        launches = [line for lines in self.launches.values() for line in lines]
        text = "\n".join(
            [*self.heading, runs, "", *table(self.rows.values()), "", *notes, "", *failed, *launches, *missing]
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{NAME}.md").write_text(text, encoding="utf-8")
        rows = [row for row in self.rows.values() if row.ms]
        results = {"launches": self.launches, "failed": self.failed, "notes": self.notes, "not_reached": unreached}
        head = {"made_with": self.made_with, "runs": self.runs, "rows": [asdict(row) for row in rows]}
        write_json(folder / f"{NAME}.json", head | results)
        return text


def named(job: Job) -> str:
    return f"{job.candidate}, {job.model}, batch {job.batch}"


def sources_hash() -> str:
    """SHA-256 of the sources in this checkout that our times depend on: a commit may be unknown, and a checkout
    changed."""
    digest = hashlib.sha256()
    for place in SOURCES:
        files = [file for file in (ROOT / place).rglob("*") if file.suffix in (".py", ".yaml")]
        for file in sorted(files) or [ROOT / place]:
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def table(rows: Collection[Row]) -> Iterator[str]:
    """One line for each network and batch."""
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    ratios = {"x trace": "trace fp16", "x trace, plain calls": PLAIN["trace fp16"], "x own fp16": "fp16"}
    head = ["model", "batch", *(f"{name} ms" for name in names), "floor ms", "int8 / floor", "GB/s", "TOP/s"]
    head += ["x best torch", *ratios]
    yield f"| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        if not row.ms:
            continue
        ours = row.ms.get("int8")
        cells = [row.model, str(row.batch), *(shown(row.ms.get(name), 3) for name in names), shown(row.floor_ms, 3)]
        cells += [
            shown(ours / row.floor_ms if ours and row.floor_ms else None, 2),
            shown(row.bytes / ours / 1e6 if ours else None, 0),
            shown(row.operations / ours / 1e9 if ours else None, 1),
            best_torch(row),
        ]
        cells += [shown(row.ms[other] / ours if ours and other in row.ms else None, 2) for other in ratios.values()]
        yield line_of(cells)


def best_torch(row: Row) -> str:
    """The speedup over the best of torch, and its name; nothing without torch.compile, the one to beat."""
    if "int8" not in row.ms:
        return "-"
    if not row.ms.keys() & {COMPILED, TUNED}:
        return "not measured"
    best = min((name for name in TORCH if name in row.ms), key=row.ms.__getitem__)
    return f"{row.ms[best] / row.ms['int8']:.2f} ({best.removesuffix(' fp16')})"


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
