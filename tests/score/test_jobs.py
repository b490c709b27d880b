"""Jobs in other processes: one that ends early ends no other."""

import os
import subprocess
import sys
import time

import pytest
from nightly import share

from swin_quant.score.jobs import JobFailed, JobProcess

SEEN = []


def work(job):
    SEEN.append(job)
    if job == "die":
        os._exit(3)
    if job == "hang":
        time.sleep(600)
    if job == "fail":
        raise ValueError("no\nsuch thing")
    return len(SEEN), os.getpid()


@pytest.mark.slow
def test_what_ends_a_job_ends_no_other():
    jobs = JobProcess(work)
    try:
        first, process = jobs.do("a", 60)
        with pytest.raises(JobFailed, match="^ValueError: no such thing$"):
            jobs.do("fail", 60)
        assert jobs.do("b", 60) == (3, process) and first == 1 and process != os.getpid()
        with pytest.raises(JobFailed, match="^its process ended with exit code 3$"):
            jobs.do("die", 60)
        started = time.monotonic()
        with pytest.raises(JobFailed, match="^took more than 1 s$"):
            jobs.do("hang", 1)
        assert time.monotonic() - started < 30
        count, other = jobs.do("c", 60)
        assert count == 1 and other != process
    finally:
        jobs.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "runs"), share([("if __name__ != '__main__':\n    print('again')\n", 2), ("", 1)], 2)
)
def test_a_script_need_not_guard_its_calls(guard, runs, tmp_path):
    """One that does is run in the process, too: it may register plugins there."""
    script = tmp_path / "script.py"
    call = "if __name__ == '__main__':\n    " if guard else ""
    use = "jobs = JobProcess(abs); print(jobs.do(-3, 60)); jobs.close()\n"
    script.write_text(f"from swin_quant.score.jobs import JobProcess\nprint('here')\n{guard}{call}{use}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("here") == runs and "3\n" in done.stdout, done.stderr
