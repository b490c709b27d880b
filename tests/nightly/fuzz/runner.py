"""Run cases in a child process, one a parser, and report how each ended.

The child is watched: processor time and memory of a case are measured, with those of its processes. A case that does
not return or ends the process is a fault of that case; another child goes on with the next.
"""

import itertools
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mutations import Files, mutated
from parsers import Parser

from swin_quant.base.errors import SwinQuantError

SECONDS, MEGABYTES = 2.0, 512  # limits of a case: processor time, and additional memory
_KILLED_AT = 3 << 30  # additional bytes, to protect the machine; the limit above only reports
_PATIENCE = 60.0  # seconds by the clock, for a case that waits
_READY = "ready"
_LONGEST_MESSAGE = 2000  # characters
CAN_WATCH = os.path.exists("/proc/self/clear_refs")


@dataclass
class Tally:
    """The outcome of one parser's cases; `faults` are sentences, each with the number of its case."""

    parser: str
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + len(self.faults)


def case(parser: Parser, valid: list[Files], number: int) -> Files:
    """The files of a case, the same for a number on every machine."""
    rng = random.Random(f"{parser.name} {number}")
    chosen, donor = rng.choice(valid), rng.choice(valid)
    return mutated(rng, chosen, donor)


def write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def attack(parser: Parser, numbers: range) -> Tally:
    """Try the cases `numbers`. The valid files must be accepted first."""
    tally = Tally(parser.name)
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        valid = parser.valid()
        todo = iter(numbers)
        for number in todo:
            for outcome in _child(parser, valid, itertools.chain([number], todo), Path(folder)):
                _note(tally, outcome)
    return tally


def _note(tally: Tally, outcome: dict) -> None:
    where = f"{tally.parser}, case {outcome['case']}: "
    tally.seconds = max(tally.seconds, outcome.get("seconds", 0.0))
    tally.megabytes = max(tally.megabytes, outcome.get("megabytes", 0.0))
    if outcome.get("seconds", 0.0) > SECONDS:
        tally.faults.append(f"{where}{outcome['seconds']:.1f} s")
    elif outcome.get("megabytes", 0.0) > MEGABYTES:
        tally.faults.append(f"{where}{outcome['megabytes']:.0f} MB")
    elif outcome["fault"]:
        tally.faults.append(where + outcome["fault"])
    elif outcome["refused"]:
        tally.refused += 1
    else:
        tally.accepted += 1


def _child(parser: Parser, valid: list[Files], numbers: Iterator[int], folder: Path) -> Iterator[dict]:
    """The outcomes of cases in one process, until all are done or one ends it.

    The parent hands out numbers one by one, so that another child can take the rest.
    """
    orders, ordered = os.pipe()
    outcomes, reported = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ordered)
        os.close(outcomes)
        _serve(parser, valid, folder, open(orders), open(reported, "w"))
    os.close(orders)
    os.close(reported)
    with open(ordered, "w") as ask, open(outcomes) as answer:
        if (line := answer.readline().strip()) != _READY:
            raise AssertionError(line)
        for number in numbers:
            print(number, file=ask, flush=True)
            waiting = select.select([answer], [], [], _PATIENCE)[0]
            if not waiting:
                os.kill(pid, signal.SIGKILL)
            line = answer.readline()
            if not line:
                yield {"case": number, "fault": _end(pid) if waiting else f"waits for more than {_PATIENCE:.0f} s"}
                break
            yield json.loads(line)
    if line:
        os.waitpid(pid, 0)


def _end(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == -signal.SIGPROF:
        return f"no end in {2 * SECONDS:.0f} s"
    return f"ends the process: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


# The child


def _serve(parser: Parser, valid: list[Files], folder: Path, orders, outcomes) -> None:
    code = 1
    try:
        logging.disable()
        sys.stderr = os.fdopen(os.dup(2), "w")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # picture libraries print there
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (_data() + _KILLED_AT,) * 2)
        for files in valid:  # this also loads what is loaded once
            outcome = _tried(parser, files, folder)
            if outcome["refused"] or outcome["fault"]:
                print(f"a valid file of {parser.name}: {outcome}", file=outcomes, flush=True)
                os._exit(1)
        print(_READY, file=outcomes, flush=True)
        for line in orders:
            outcome = _tried(parser, case(parser, valid, int(line)), folder)
            print(json.dumps({"case": int(line), **outcome}), file=outcomes, flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _data() -> int:
    """Bytes of data of this process, as RLIMIT_DATA counts them: a test's process may hold gigabytes already."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData")), 0)


def _tried(parser: Parser, files: Files, folder: Path) -> dict:
    place = folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    write(files, place)
    before = {str(path) for path in folder.rglob("*")}
    os.chdir(folder)
    watch = Watch()
    signal.setitimer(signal.ITIMER_PROF, 2 * SECONDS)  # ends the process even inside a library
    refused, fault = "", ""
    try:
        parser.parse(place)
    except SwinQuantError as error:
        refused, fault = str(error), _bad_message(str(error))
    except Exception as error:  # the fault sought
        last = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__}: {error!s:.200} ({Path(last.filename).name}:{last.lineno})"
    signal.setitimer(signal.ITIMER_PROF, 0)
    outcome = {"refused": refused, "fault": fault, **watch.measured()}
    if written := {str(path) for path in folder.rglob("*")} - before:
        outcome["fault"] = f"writes {sorted(written)}"
    return outcome


def _bad_message(message: str) -> str:
    if message.isprintable() and 0 < len(message) <= _LONGEST_MESSAGE:
        return ""
    return f"its message is no line of text: {len(message)} characters, {message[:300]!a}"


class Watch:
    """Processor time and memory from now on, of this process and its running children."""

    def __init__(self) -> None:
        for pid in _family():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak to now
        self.memory, self.started = _memory(), _processor_seconds()

    def measured(self) -> dict[str, float]:
        peaks = {pid: peak - self.memory.get(pid, (0, 0))[0] for pid, (_, peak) in _memory().items()}
        return {"seconds": _processor_seconds() - self.started, "megabytes": sum(peaks.values()) / 1024}


def _family() -> list[int]:
    """This process and its children."""
    return [os.getpid(), *map(int, Path("/proc/thread-self/children").read_text().split())]


def _memory() -> dict[int, tuple[int, int]]:
    """Process -> kB held now, and at most."""
    found = {}
    for pid in _family():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if "VmRSS" in status:  # a zombie lacks it
            found[pid] = int(status["VmRSS"].split()[0]), int(status["VmHWM"].split()[0])
    return found


def _processor_seconds() -> float:
    own = os.times()
    ticks = 0
    for pid in _family()[1:]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + own.children_user + own.children_system + ticks / os.sysconf("SC_CLK_TCK")
