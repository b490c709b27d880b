"""From a fresh clone and nothing but the README to a service that answers: its lines, as they stand, in a shell."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.search(r"## A running service\n(.*?)\n## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL) for line in block.splitlines()]
# In place of the environment that `make` would fill from the network: this one, and a demo that trains for one epoch.
OURS = """#!/bin/sh
[ "$1" = demo ] && set -- "$@" --epochs 1
exec {python} -m swin_quant "$@"
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger") / "swin-quant"
    if subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True).returncode:
        pytest.skip("not in a checkout")
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder], check=True)
    command = folder / ".venv" / "bin" / "swin-quant"
    command.parent.mkdir(parents=True)
    command.write_text(OURS.format(python=sys.executable))
    command.chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    return folder


@pytest.mark.slow
def test_a_stranger_gets_from_the_readme_to_answers(clone):
    for needed in ("openvino", "uvicorn", "prometheus_client", "sklearn"):
        pytest.importorskip(needed)
    if not shutil.which("make") or not shutil.which("curl"):
        pytest.skip("needs make and curl")
    with socket.socket() as probe:  # 8000 may be another's here
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    how = {"cwd": clone, "env": environment, "text": True, "shell": True}
    *before, serve, ask = LINES
    for line in before:
        done = subprocess.run(line, capture_output=True, **how)
        assert done.returncode == 0, done.stdout + done.stderr
    with subprocess.Popen(f"exec {serve} --port {port}", **how) as service:
        try:
            end = time.monotonic() + 60
            while not listens(port) and service.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            done = subprocess.run(ask.replace("localhost:8000", f"127.0.0.1:{port}"), capture_output=True, **how)
            answer = json.loads(done.stdout)
            assert [len(one["name"]) for one in answer["classes"]] == [1] * 5 and answer["model"] == "swin_micro_digits"
            assert sum(one["probability"] for one in answer["classes"]) <= 1.0001
        finally:
            service.send_signal(signal.SIGTERM)
    assert service.returncode == 0


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_it_is_no_long_way():
    """With `git clone` and `cd` before it."""
    assert [line.split()[0] for line in LINES] == ["make", ".venv/bin/swin-quant", "curl"] and len(LINES) + 2 <= 6
