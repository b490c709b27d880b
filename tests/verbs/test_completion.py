"""swin-quant completion: the script holds every command and flag, and bash accepts it."""

import shutil
import subprocess

import pytest

from swin_quant.cli.commands import COMMANDS

pytest.importorskip("shtab")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_commands_and_flags_are_completed(run, shell):
    done = run("completion", shell).ok()
    assert all(name.split()[-1] in done.out for name in COMMANDS)
    assert "saturation-safe" in done.out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_it(run):
    done = subprocess.run(["bash", "-n"], input=run("completion", "bash").out, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
