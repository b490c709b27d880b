"""Run everything that needs a GPU in at most nine minutes, and leave one archive and a summary of one page.

    scripts/gpu_check.sh [--device cuda|cpu] [--seconds N] [--only STEP ...] [--go-on ARCHIVE] [--wheels FOLDER]

The steps, in gpu_steps.py, are tests, commands and measurements of the CUDA engine first, then of everything else that
uses a GPU. Each has its own time limit and log. A step that takes too long is interrupted and reports its progress; a
failure stops only the steps that read its files; a step that this machine cannot run is skipped, with the reason. Exit
code 1 if a step failed.

OUT is the folder (default: out/gpu_check) of `summary.md` and `gpu_check.tar.gz`, which holds every log, table and
result; both are written again after each step. `--go-on` takes such an archive, or a folder with it or its files: steps
that passed there under the same GPU, versions and sources are not run again. `--only` runs these steps, and those whose
files they read.

Nothing is downloaded. Packages that the machine lacks come from wheels in `gpu_wheels` (`--wheels`), which
scripts/gpu_wheels.sh fills where there is an index. That folder and an archive must travel to the machine with the
checkout: where only files travel that git tracks or does not ignore, lay them into the checkout, and commit neither.

`--device cpu` is a dry run with smaller work; its summary says that no GPU was measured. This file and gpu_steps.py
need nothing but Python's own library.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_steps import Place, Step, list_steps

ROOT = Path(__file__).resolve().parents[1]
ARCHIVE, SUMMARY, RECORD = "gpu_check.tar.gz", "summary.md", "run.json"
SOURCES = ("swin_quant", "tests", "benchmarks", "scripts", "tools")
WHOLE = 525  # seconds that each step's `least` is a part of; an interrupted step takes up to GRACE more
GRACE = 10
ENDING = 3  # seconds for an interrupted step to end and the next to begin
LEAST = 3  # seconds; a step with less is not started
LARGEST = 32 * 2**20  # bytes of a file in an archive
SHOWN, TAIL, ROWS = 4, 12, 16  # failed steps whose last lines the summary shows, these lines, and rows of the times
KINDS = ("failed", "skipped", "passed")
NO_TIME = "failed: no time was left"


@dataclass
class Result:
    """Seconds of a step, and `said`: passed, skipped or failed, and why."""

    seconds: int
    said: str

    @property
    def kind(self) -> str:
        return re.split("[: ]", self.said)[0]


@dataclass
class Check:
    """One run: `evidence` is the folder that becomes the archive, `conditions` all that a result depends on."""

    out: Path
    evidence: Path
    device: str
    seconds: int
    environment: dict[str, str]
    conditions: str = ""
    notes: list[str] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    started: float = field(default_factory=lambda: time.monotonic())

    def limit(self, step: Step, waiting: list[Step]) -> int:
        """Seconds for a step before others that are `waiting`: its least, and half of the time that nobody needs. The
        last step gets all; if too little is left for all, they share it."""
        part = self.seconds / WHOLE
        left = self.started + self.seconds - time.monotonic() - ENDING * len(waiting) * part
        needed = part * sum(one.least for one in (step, *waiting))
        if not waiting:
            return int(left)
        if left < needed:
            return int(part * step.least * left / needed)
        return int(part * step.least + (left - needed) / 2)

    def run(self, steps: list[Step]) -> None:
        """Run steps in order; each leaves time to those behind it."""
        for number, step in enumerate(steps):
            waiting = [one for one in steps[number + 1 :] if not one.skipped]
            if step.skipped:
                self.keep(step.name, Result(0, f"skipped: {step.skipped}"))
            elif lost := [name for name in step.needs if self.results[name].kind == "failed"]:
                self.keep(step.name, Result(0, f"failed: it needs {lost[0]}, which failed"))
            else:
                limit, start = self.limit(step, waiting), time.monotonic()
                print(f"{step.name} ... ", end="", flush=True)
                said = self.one(step, limit) if limit >= LEAST else NO_TIME
                self.keep(step.name, Result(round(time.monotonic() - start), said))

    def one(self, step: Step, limit: int) -> str:
        """Run a step within `limit` seconds, and say how it ended."""
        command = step.within(limit)
        log = self.evidence / f"{step.name}.log"
        with log.open("w", encoding="utf-8") as file:
            file.write(f"{' '.join(command)}\n")
            file.flush()
            code = finished(command, limit, file, self.environment)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        counts = lines[-1].strip("= ") if "pytest" in command and " in " in lines[-1] else ""
        if code == 0 and self.device == "cuda" and "pytest" in command and " passed" not in counts:
            code = 5
        why = {None: f"more than {limit} s", 5: "no test ran", 127: lines[-1]}.get(code, f"exit code {code}")
        return ("passed" if code == 0 else f"failed: {why}") + (counts and f": {counts}")

    def keep(self, name: str, result: Result) -> None:
        """Add a result, and write archive and summary, in case this process is killed."""
        if result.kind == "skipped" or result.said.startswith("failed: it needs"):
            print(f"{name} ... ", end="")
        print(f"{result.said}, {result.seconds} s", flush=True)
        self.results[name] = result
        record = {"conditions": self.conditions, "steps": {key: asdict(one) for key, one in self.results.items()}}
        (self.evidence / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        (self.evidence / SUMMARY).write_text("\n".join(self.summary()), encoding="utf-8")
        self.out.mkdir(parents=True, exist_ok=True)
        unfinished = self.out / f".{ARCHIVE}"
        with tarfile.open(unfinished, "w:gz") as archive:
            for file in sorted(self.evidence.iterdir()):
                archive.add(file, file.name)
        os.replace(unfinished, self.out / ARCHIVE)
        shutil.copy(self.evidence / SUMMARY, self.out)

    def summary(self) -> list[str]:
        """The page: steps, the last lines of failed ones, the engine's times, and the machine."""
        of = {kind: [name for name, one in self.results.items() if one.kind == kind] for kind in KINDS}
        head = "GPU check" if self.device == "cuda" else "DRY RUN of the GPU check on a CPU"
        tail = "" if self.device == "cuda" else "; no GPU was used"
        lines = [f"# {head}: {len(of['failed'])} of {len(self.results)} steps failed{tail}", ""]
        took = time.monotonic() - self.started
        day = time.strftime("%FT%TZ", time.gmtime())
        lines += [f"{revision()}, {day}, {took:.0f} s", *filter(None, [self.conditions, *self.notes]), ""]
        lines += ["| step | s | result |", "|---|---:|---|"]
        lines += [
            f"| {name} | {one.seconds} | {one.said} |"
            for kind in KINDS
            for name, one in self.results.items()
            if one.kind == kind
        ]
        for name in [name for name in of["failed"] if self.log(name)][:SHOWN]:
            lines += ["", f"## {name} failed", "", "```", *self.log(name)[-TAIL:], "```"]
        page = "\n".join(self.log("cuda_engine", ".md"))
        first = re.search(r"^\|.*(?:\n\|.*)*", page, re.MULTILINE)
        lines += ["", "## times of the engine", "", *first[0].splitlines()[:ROWS]] if first else []
        return [*lines, "", "## environment", "", "```", *self.log("environment"), "```", ""]

    def log(self, name: str, ending: str = ".log") -> list[str]:
        file = self.evidence / f"{name}{ending}"
        return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


def finished(command: list[str], limit: float, log: io.TextIOBase, environment: dict[str, str]) -> "int | None":
    """The exit code of a command, or None if it was interrupted after `limit` seconds.

    pytest, and what cleans up, end on SIGINT with a report, on SIGTERM without.
    """
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        log.write(f"{error}\n")
        return 127
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue


def earlier(given: Path) -> dict[str, bytes]:
    """The files of an earlier run: its archive, a folder with it, or one with its files. SystemExit if it is none."""
    found: dict[str, bytes] = {}
    given = given / ARCHIVE if (given / ARCHIVE).is_file() else given
    try:
        if given.is_dir():
            files = {file.name: file for file in given.iterdir() if file.is_file()}
            found = {name: file.read_bytes() for name, file in files.items() if file.stat().st_size <= LARGEST}
        else:
            with tarfile.open(given, "r:gz") as archive:
                for member in archive:
                    if member.isfile() and re.fullmatch(r"\w[\w.-]*", member.name) and member.size <= LARGEST:
                        found[member.name] = archive.extractfile(member).read()
        record = json.loads(found[RECORD])
        if not isinstance(record["conditions"], str):
            raise ValueError("no conditions")
        for one in record["steps"].values():
            if not isinstance(Result(**one).said, str):
                raise ValueError("no result")
    except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, tarfile.TarError) as error:
        sys.exit(refused(f"--go-on {given}: is no {ARCHIVE} of an earlier run ({type(error).__name__})"))
    return found


def unpack(folder: Path, site: Path) -> str:
    """Unpack the wheels of a folder that this Python takes; returns a line that names the others."""
    wheels = sorted(folder.glob("*.whl"))
    try:
        from packaging.tags import sys_tags
        from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    except ImportError:  # pip has its own copy
        from pip._vendor.packaging.tags import sys_tags
        from pip._vendor.packaging.utils import InvalidWheelFilename, parse_wheel_filename
    ours, other = set(sys_tags()), []
    for wheel in wheels:
        try:
            if ours.isdisjoint(parse_wheel_filename(wheel.name)[3]):
                raise ValueError("of another Python or platform")
            with zipfile.ZipFile(wheel) as content:
                content.extractall(site)
        except (InvalidWheelFilename, zipfile.BadZipFile, ValueError, OSError):
            other.append(wheel.name)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    said = f"{len(wheels) - len(other)} wheels of {folder.name} are used"
    again = f"; not for this Python or broken: {', '.join(other)}: scripts/gpu_wheels.sh --python {python}"
    return said + (again if other else "")


def chosen(steps: list[Step], only: list[str], passed: set[str]) -> list[Step]:
    """The steps that are wanted, and that did not pass earlier, with all whose files they read."""
    wanted: set[str] = set()
    for step in reversed(steps):
        asked = step.name in only if only else step.name not in passed
        if step.name in wanted or asked:
            wanted |= {step.name, *step.needs}
    return [step for step in steps if step.name in wanted]


def sources() -> str:
    """The beginning of the SHA-256 of the checkout's Python files."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def revision() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "no git"


def refused(said: str) -> int:
    print(f"gpu_check.sh: {said}", file=sys.stderr)
    return 2


def make_environment(device: str, work: Path) -> dict[str, str]:
    """The environment of every step."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(work / "site")]
    given = os.environ | {"PYTHONPATH": ":".join(filter(None, path)), "PYTHONUNBUFFERED": "1"}
    given |= {"SWIN_QUANT_GPU": device, "HF_HUB_OFFLINE": "1"}
    given.pop("TRITON_INTERPRET", None)  # kernels would be interpreted on the GPU's tensors
    if not os.access(os.environ.get("HOME", "/nowhere"), os.W_OK):  # steps share the caches
        given |= {"TRITON_CACHE_DIR": str(work / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    return given


def main(words: list[str], python: str = sys.executable) -> int:
    parser = argparse.ArgumentParser(
        "gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=int, default=WHOLE)
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--go-on", type=Path, metavar="ARCHIVE")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    args = parser.parse_args(words)
    if args.seconds < 10:
        return refused(f"--seconds {args.seconds}: 10 or more")
    wheels = args.wheels or ROOT / "gpu_wheels"
    if args.wheels and not any(args.wheels.glob("*.whl")):
        return refused(f"--wheels {args.wheels}: holds no wheel: scripts/gpu_wheels.sh {args.wheels} downloads them")
    before = earlier(args.go_on) if args.go_on else {}
    with TemporaryDirectory() as folder:
        work = Path(folder)
        evidence = work / "evidence"
        evidence.mkdir()
        out = Path(os.environ.get("OUT") or ROOT / "out/gpu_check").resolve()
        check = Check(out, evidence, args.device, args.seconds, make_environment(args.device, work))
        place = Place(python, args.device, work, evidence)
        unknown = set(args.only) - {step.name for step in list_steps(place)}
        if unknown:
            known = ", ".join(step.name for step in list_steps(place))
            return refused(f"--only {' '.join(sorted(unknown))}: it is one of {known}")
        for name, content in before.items():
            (evidence / name).write_bytes(content)
        if wheels.is_dir():
            check.notes.append(unpack(wheels, work / "site"))
            print(check.notes[-1], flush=True)
        code = run_all(check, place, args.only, json.loads(before[RECORD]) if before else {})
        print("\n".join(check.summary()).partition("## environment")[0])
        print(out / SUMMARY, out / ARCHIVE, sep="\n")
    return code


def run_all(check: Check, place: Place, only: list[str], before: dict) -> int:
    """Run the environment's step, then all that it allows."""
    environment, *rest = list_steps(place)
    check.run([environment])
    place.facts = check.log(environment.name)
    made_with = next((line for line in place.facts if line.startswith("made with ")), "")
    if not made_with:
        return 1  # no step can run
    check.conditions = f"{made_with}, sources {sources()}"
    passed = set()
    if before and before["conditions"] == check.conditions:
        check.results |= {name: Result(**one) for name, one in before["steps"].items() if name != environment.name}
        passed = {name for name, one in check.results.items() if one.kind == "passed"}
        check.notes.append(f"it goes on from an earlier run, in which {len(passed)} steps passed")
    elif before:
        check.notes.append("the earlier run is of another GPU, other versions or other sources: every step is run anew")
    if before:
        print(check.notes[-1], flush=True)
    _, *rest = list_steps(place)
    check.run(chosen(rest, only, passed))
    return int(any(one.kind == "failed" for one in check.results.values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the running step's processes are ended
    sys.exit(main(sys.argv[1:]))
