"""The reasons for which CI may skip a test. A missing library fails the run; other reasons are shown."""

import re
from collections import Counter

ALLOWED = (  # each is a regular expression for the whole reason
    r"torch finds no GPU here",
    r"it is a GPU's",
    r".*needs (a|an NVIDIA) GPU.*",
    r"loss scaling is for GPUs",
    r"torch does not count a CPU's memory",
    r"OpenVINO sees this CPU's AVX-512 and asks for kernels that oneDNN must not use",  # no CPU of a second vendor
    r"no bfloat16",  # the CPU
    r"root may write anywhere",  # CI is root, or the test needs a user
    r"this user may not mount",
    r"this file system takes UTF-8 names only",
    r"no package index",  # without a network
)

# Libraries that tests compare with: without one of them CI fails.
COMPARED = "transformers|torchvision|timm|mmpretrain|onnxruntime|openvino"


class SkipReport:
    """Collects the skips of a run, as a plugin of pytest in the process that reports."""

    def __init__(self) -> None:
        self.skips: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report) -> None:
        self._add(report)

    def pytest_collectreport(self, report) -> None:
        self._add(report)

    def _add(self, report) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skips[report.nodeid.split("::")[0], reason.removeprefix("Skipped: ")] += 1

    def refused(self) -> list[str]:
        """One line for each file and reason that is not allowed."""
        return [
            f"{file}: {count} skipped: {reason}"
            for (file, reason), count in sorted(self.skips.items())
            if not any(re.fullmatch(pattern, reason) for pattern in ALLOWED)
        ]

    def pytest_sessionfinish(self, session) -> None:
        missing = [line for line in self.refused() if re.search(rf"could not import '({COMPARED})\b", line)]
        if missing and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if refused := self.refused():
            terminalreporter.section("skipped for a reason that tests/helpers/allowed_skips.py does not list", red=True)
            terminalreporter.write_line("\n".join(refused))
