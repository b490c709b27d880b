"""Two ranks, one of which is frozen, killed, ended or absent: the other ends within a minute, with one line."""

import ctypes
import itertools
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import free_port, meeting

from swin_quant.base import watchdog

FROZEN, KILLED, ENDED, ABSENT = "frozen (kill -STOP)", "kill -9", "SIGTERM", "never there"
SIGNALS = {FROZEN: signal.SIGSTOP, KILLED: signal.SIGKILL, ENDED: signal.SIGTERM}
FORKS, PLAIN = "forks, a tenth of the patience", "plain processes"
AGENTS = {"torchrun": "torch.distributed.run", "torch.distributed.launch": "torch.distributed.launch"}
COMMANDS = ("calibrate", "evaluate", "train", "finetune")
PROMISE = 60.0  # seconds
# The message of a rank that another's fault ended
END = re.compile(r"error \(rank \d\): (stopped, since |interrupted)")
AT_ONCE = 4  # cases
FEW = [
    ("train", FROZEN, 0, FORKS),
    ("evaluate", FROZEN, 0, FORKS),
    ("finetune", FROZEN, 1, FORKS),
    ("calibrate", KILLED, 0, FORKS),
    ("train", ENDED, 1, FORKS),
    ("evaluate", ABSENT, 0, FORKS),
]


@dataclass
class Run:
    """Two ranks of one command; `children` by rank, or only the launcher."""

    children: list[Any]
    logs: Path | None = None  # a launcher's

    def pids(self):
        """{rank: pid} of the ranks that run."""
        if self.logs is None:
            return {rank: child.pid for rank, child in enumerate(self.children) if child and not child.poll()}
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                own = dict(item.partition(b"=")[::2] for item in environ.read_bytes().split(b"\0"))
                state = (environ.parent / "stat").read_text().rpartition(")")[2].split()
                if own.get(b"FAULT_RUN") == str(self.logs).encode() and b"LOCAL_RANK" in own and state[0] != "Z":
                    found[int(own[b"RANK"])] = int(environ.parent.name)
        return found

    def errors(self, rank):
        """The lines of a rank on standard error."""
        if self.logs is None:
            return self.children[rank].poll().err.splitlines()
        return [line for file in self.logs.rglob(f"{rank}/stderr.log") for line in file.read_text().splitlines()]

    def codes(self):
        """The exit codes of its processes; None while they run."""
        ends = [child.poll() for child in self.children if child]
        return [done.code for done in ends] if all(ends) else None


@pytest.fixture
def start(fork, tmp_path):
    """start(words, launcher, absent) -> Run; without a launcher, forks of this process with full patience."""
    numbers = itertools.count()

    def go(words, launcher=None, absent=None) -> Run:
        if launcher in AGENTS:
            logs = tmp_path / f"logs{next(numbers)}"
            agent = [AGENTS[launcher], "--nproc_per_node", "2", "--master_port", free_port(), "--redirects", "3"]
            agent = [*agent, "--log-dir", str(logs), "--module", "swin_quant"]
            return Run([fork(words, {"FAULT_RUN": str(logs)}, partial(_execute, ["-m", *agent, *words]))], logs)
        common = meeting(2)
        before = {FORKS: _impatient, PLAIN: partial(_execute, ["-m", "swin_quant", *words])}.get(launcher)
        environments = [common | {"RANK": str(rank)} for rank in range(2)]
        return Run([None if rank == absent else fork(words, environments[rank], before) for rank in range(2)])

    return go


def _impatient():
    watchdog._TICK_SECONDS = 0.1


def _execute(words):
    os.execv(sys.executable, [sys.executable, *words])


@dataclass(repr=False)
class Case:
    """A run that one rank leaves by `fault`, `delay` seconds after its start."""

    command: str
    fault: str
    victim: int
    launcher: str
    delay: float
    out: Path
    run: Run
    struck: float | None = None  # the time
    ended: float | None = None  # the time when the others ended
    began: float = field(default_factory=time.monotonic)

    def __str__(self):
        return f"{self.command}, rank {self.victim} {self.fault} after {self.delay:.1f} s, {self.launcher}"

    def step(self, patience):
        """Strike when it is time, and check whether the others have ended. Returns whether this case is over."""
        now, pids = time.monotonic(), self.run.pids()
        if self.struck is None:
            if len(pids) < 2 and self.fault != ABSENT and self.run.codes() is None:
                self.began = now  # a launcher's ranks are on their way
            elif now - self.began >= self.delay:
                self.struck = now
                if self.fault != ABSENT and self.victim in pids:
                    os.kill(pids[self.victim], SIGNALS[self.fault])
        elif self.ended is None and not pids.keys() - {self.victim}:
            self.ended = now
            if self.victim in pids and self.fault == FROZEN:
                os.kill(pids[self.victim], signal.SIGKILL)
        assert self.struck is None or now - self.struck < patience + PROMISE, f"{self}: still running"
        return self.ended is not None and self.run.codes() is not None


@pytest.fixture
def undisturbed(start, commands, tmp_path):
    """undisturbed(command) -> the results of a run without faults, and its time."""
    known = {}

    def run(command):
        if command not in known:
            out, began = tmp_path / f"undisturbed_{command}", time.monotonic()
            ends = [child.wait(600) for child in start(commands.words(command, out)).children]
            assert [done.code for done in ends] == [0, 0], ends
            known[command] = commands.results(command, out), time.monotonic() - began
        return known[command]

    return run


def check(case, complete):
    """The others must end with one line and exit code 1, or normally if the fault came too late; returns the most
    lines."""
    lines = {rank: case.run.errors(rank) for rank in range(2) if (rank, case.fault) != (case.victim, ABSENT)}
    others = {rank: said for rank, said in lines.items() if rank != case.victim or case.fault == ENDED}
    for said in others.values():
        assert len(said) <= 1 and all(map(END.match, said)), (str(case), lines)
    code = case.run.codes()[0 if case.run.logs or len(case.run.codes()) == 1 else 1 - case.victim]
    allowed = {1} | ({0} if complete else set()) | ({130} if case.fault == ENDED else set())
    assert code in allowed, (str(case), code, lines)
    return max(map(len, others.values()))


def attack(cases, start, commands, undisturbed, tried, patience):
    """Run all cases at once, then every command again, which must give the results of an undisturbed run."""
    while not all([case.step(patience) for case in cases]):
        time.sleep(0.02)
    for case in cases:
        expected, _ = undisturbed(case.command)
        lines = check(case, commands.results(case.command, case.out) == expected)
        ends = [child.wait(300) for child in start(commands.again(case.command, case.out)).children]
        assert [done.code for done in ends] == [0, 0], (str(case), ends)
        found = commands.results(case.command, case.out)
        lost = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        print(f"{case}: ended after {case.ended - case.struck:.1f} s, {lines} line, {len(lost)} lost")
        tried(f"a rank {case.fault}: {case.launcher}", len(lost), case.ended - case.struck, lines)
        assert not lost, (str(case), lost)


def make_case(start, commands, out, delay, command, fault, victim, launcher):
    run = start(commands.words(command, out), launcher, victim if fault == ABSENT else None)
    return Case(command, fault, victim, launcher, delay, out, run)


@pytest.mark.slow
def test_whatever_becomes_of_one_rank_the_other_ends_and_nothing_is_lost(start, commands, undisturbed, tried, tmp_path):
    chance = random.Random(1)
    delays = [chance.uniform(0, 1) * undisturbed(command)[1] for command, *_ in FEW]
    cases = [
        make_case(start, commands, tmp_path / str(number), delay, *kind)
        for number, (kind, delay) in enumerate(zip(FEW, delays, strict=True))
    ]
    attack(cases, start, commands, undisturbed, tried, patience=0.0)


def test_random_faults_under_every_launcher(start, commands, undisturbed, tried, tmp_path, cases):
    if not cases:
        pytest.skip("FAULT_CASES says how many")
    chance = random.Random(2)
    ways = [(fault, launcher) for fault in (*SIGNALS, ABSENT) for launcher in (PLAIN, *AGENTS)]
    kinds = [
        (command, fault, victim, launcher)
        for fault, launcher in ways
        for command in COMMANDS
        for victim in range(2)
        if (fault, launcher) not in itertools.product([ABSENT], AGENTS)  # a launcher starts all ranks
    ]
    chance.shuffle(kinds)
    began = time.monotonic()
    ends = [child.wait(600) for child in start(commands.words("train", tmp_path / "first"), PLAIN).children]
    assert [done.code for done in ends] == [0, 0], ends
    whole = time.monotonic() - began
    for first in range(0, cases, AT_ONCE):
        chosen = [kinds[number % len(kinds)] for number in range(first, min(first + AT_ONCE, cases))]
        group = [
            make_case(start, commands, tmp_path / f"{first}_{number}", chance.uniform(0, 1) * whole, *kind)
            for number, kind in enumerate(chosen)
        ]
        attack(group, start, commands, undisturbed, tried, patience=whole)


@pytest.mark.slow
def test_work_that_lets_no_other_thread_run_is_no_silence(forked, commands, tmp_path):
    """Half of the patience with the interpreter's lock held: libraries do that, and no rank may end for it."""

    def before(rank):
        from swin_quant.data.loader import DrawnBatches

        _impatient()
        original = DrawnBatches.__iter__

        def batches(*arguments):
            for number, batch in enumerate(original(*arguments)):
                if number == rank:
                    ctypes.PyDLL(None).usleep(int(1e6 * watchdog._TICK_SECONDS * watchdog._SILENCE_TICKS / 2))
                yield batch

        DrawnBatches.__iter__ = batches

    ends = forked(2, *commands.words("calibrate", tmp_path / "out"), before=before)
    assert [done.code for done in ends] == [0, 0], ends


@pytest.mark.slow
def test_a_job_that_is_stopped_and_continued_as_a_whole_goes_on(start, commands, undisturbed, tmp_path):
    expected, seconds = undisturbed("train")
    run = start(commands.words("train", tmp_path / "out"), FORKS)
    time.sleep(seconds / 2)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for child in run.children:
            os.kill(child.pid, number)
        if number == signal.SIGSTOP:
            time.sleep(1.5 * watchdog._SILENCE_TICKS * 0.1)
    assert [child.wait(60).code for child in run.children] == [0, 0]
    assert commands.results("train", tmp_path / "out") == expected
