"""Jobs in other processes: one that ends early ends no other."""

import os
import time

import pytest
from jobs import JobFailed, JobProcess

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


@pytest.mark.nightly
def test_what_ends_a_job_ends_no_other():
    jobs = JobProcess(work)
    try:
        first, process = jobs.do("a", 60)
        with pytest.raises(JobFailed, match="^ValueError: no such thing$"):
            jobs.do("fail", 60)
        assert jobs.do("b", 60) == (3, process) and first == 1 and process != os.getpid()
        with pytest.raises(JobFailed, match="^ended its process$"):
            jobs.do("die", 60)
        started = time.monotonic()
        with pytest.raises(JobFailed, match="^took more than 1 s$"):
            jobs.do("hang", 1)
        assert time.monotonic() - started < 30
        count, other = jobs.do("c", 60)
        assert count == 1 and other != process
    finally:
        jobs.close()
