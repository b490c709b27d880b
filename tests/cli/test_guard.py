"""Text that cannot be printed, readers that left, and interruptions end a command in one line and an exit code."""

import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from nightly import share

from swin_quant.base.errors import UsageError
from swin_quant.cli import guard

LOUD = "print(chr(10).join(map(str, range(20_000))))"
FAILING = "(_ for _ in ()).throw(UsageError('no'))"
FULL = "error: standard output cannot be written: the disk is full\n"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(line, before="unset PYTHONUNBUFFERED;"):
    """Run `line` in a shell, in which PY starts Python; how it ended."""
    line = f"{before} {line.replace('PY', sys.executable)}"
    # a background job inherits an ignored SIGINT, which its children cannot restore
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=600, preexec_fn=heard)


def guarded(work):
    return f"""PY -c "
import sys
from swin_quant.cli.guard import guarded
from swin_quant.base.errors import UsageError
sys.exit(guarded(lambda: {work} or 0))
" """


def test_a_package_that_is_missing_is_named_with_how_to_get_it(capsys):
    def work():
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    assert guard.guarded(work) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "timm is not installed: pip install" in line and "bug" not in line


def test_the_launcher_repeats_the_line_of_the_first_rank_that_failed(monkeypatch, tmp_path):
    """Read as torchrun reads it for the end of what it prints."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def work():
        raise UsageError("swin.pht: no such checkpoint")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert guard.guarded(work) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    *_, line, border = str(ChildFailedError("main.py", {0: failure})).strip().splitlines()
    assert line.endswith("error: swin.pht: no such checkpoint") and set(border) == {"="}


@pytest.mark.parametrize("buffered", share(["unset PYTHONUNBUFFERED;", "export PYTHONUNBUFFERED=1;"], 2))
@pytest.mark.parametrize("line", ["PY -m swin_quant show --help", guarded(LOUD)])
def test_a_reader_that_has_seen_enough_is_no_error(line, buffered):
    done = shell(f"{line} | true; exit ${{PIPESTATUS[0]}}", buffered)
    assert (done.returncode, done.stderr) == (0, "")


@needs_full
@pytest.mark.parametrize("buffered", ["unset PYTHONUNBUFFERED;", "export PYTHONUNBUFFERED=1;"])
@pytest.mark.parametrize("line", ["PY -m swin_quant --help", guarded(LOUD)])
def test_a_full_disk_is_said_of_standard_output(line, buffered):
    done = shell(f"{line} > /dev/full", buffered)
    assert (done.returncode, done.stderr) == (1, FULL)


@needs_full
def test_a_full_disk_does_not_hide_the_error_before_it():
    done = shell(f"{guarded('print(1) or ' + FAILING)} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "error: no\n")


def test_closed_standard_streams_are_nobody_s_place():
    """No file opened later gets their descriptors."""
    assert shell("PY -m swin_quant --version >&-").returncode == 0
    done = shell(f"{guarded('print(1) or print(open(sys.executable).fileno(), file=sys.stderr)')} >&-")
    assert done.returncode == 0 and int(done.stderr) > 2
    assert shell("PY -m swin_quant --version >&- 2>&- <&-").returncode == 0


@needs_full
@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_the_exit_code_is_right_where_nobody_can_be_told(where):
    done = shell(f"PY -m swin_quant no-such-command {where}")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_path_that_is_no_text_is_printed_with_escapes():
    work = "import sys; from swin_quant.cli.guard import guarded\n"
    work += "sys.exit(guarded(lambda: print('out\\udce9') or 0))"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\\udce9\n", b"")


def test_messages_that_cannot_be_written_do_not_end_the_work():
    work = "(progress.set_up(), progress.log.info('message'), print('result'))[3:]"
    line = guarded(work).replace("import sys", "import sys; from swin_quant.base import progress")
    done = shell(f"{line} 2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "result\n")


def test_a_command_inside_a_library_says_what_it_ends_and_a_second_signal_ends_it_at_once():
    code = (
        "import hashlib, sys\nfrom swin_quant.base.progress import track\nfrom swin_quant.cli.guard import guarded\n"
        "def work():\n    for _ in track([1], 'compiling'):\n        print('here', flush=True)\n"
        "        hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
        "sys.exit(guarded(work))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    time.sleep(0.5)  # until it is inside
    child.send_signal(signal.SIGTERM)
    assert child.stderr.readline() == "stopping: compiling ends first; a second signal ends it at once\n"
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_during_an_import_waits_for_its_end(tmp_path, number):
    """Raised inside the import machinery, it could be lost or come out as another error."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "for _ in range(3):\n    try:\n        sum(range(10**5))\n    except BaseException:\n        pass\n"
        "print('imported', flush=True)\n"
    )
    done = shell(guarded("(__import__('slow'), __import__('time').sleep(30))"), f"PYTHONPATH={tmp_path}:$PYTHONPATH")
    assert (done.returncode, done.stdout) == (130, "imported\n")
    assert done.stderr == "error: interrupted; nothing half-written is left\n"


def test_an_interrupt_during_a_finalizer_waits_for_its_end(tmp_path):
    """Python prints an exception of a finalizer and goes on: the interrupt would be lost."""
    (tmp_path / "held.py").write_text(
        "import os, signal, time\n"
        "class Held:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGINT)\n        sum(range(10**5))\n"
        "def run():\n    Held()\n    time.sleep(30)\n"
    )
    done = shell(guarded("__import__('held').run()"), f"PYTHONPATH={tmp_path}:$PYTHONPATH")
    assert done.returncode == 130 and done.stderr == "error: interrupted; nothing half-written is left\n"


def test_arguments_that_no_library_takes(run):
    for flags, says in (
        (["show", "--cfg", "--"], "--cfg"),
        (["demo", "--epochs", 10**20], "--epochs 100000000000000000000: is beyond 2147483647"),
        (["demo", "--epochs", "9" * 5000], "is no whole number"),
        (["calibrate", "--cfg", "swin_digits", "--pictures", -(10**20)], "--pictures"),
    ):
        assert says in run(*flags).error(2)


def test_names_that_lead_nowhere(run, tmp_path):
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    (tmp_path / "there.pth").write_bytes(b"precious")
    places = {"long": "x" * 300, "out": tmp_path / "out", "loop": tmp_path / "loop.pth"}
    for words, says in (
        (["show", "--cfg", "swin_digits", "--checkpoint", "{long}"], "name too long"),
        (["report", "{long}"], "name too long|no such"),  # which of the two depends on Python's version
        (["show", "{long}.onnx"], "name too long|no such"),
        (["show", "--cfg", "swin_digits", "--checkpoint", "{loop}"], "symbolic links"),
        (["export", "--checkpoint", "none.pth", "--for", "onnx", "--output", "{out}"], "none.pth: no such checkpoint"),
        (["predict", "none.pth", "x.jpg"], "no such"),
    ):
        line = run(*(word.format(**places) for word in words)).error(1)
        assert re.search(says, line, re.IGNORECASE), line
        assert (tmp_path / "there.pth").read_bytes() == b"precious" and not (tmp_path / "out").exists()
