"""The reasons for which CI may skip a test; any other skip fails the run, above all one for a missing library."""

import re
from collections import Counter

ALLOWED = (  # each is a regular expression for the whole reason
    r"torch finds no GPU here|there is no GPU|it is a GPU's|loss scaling is for GPUs",
    r"torch does not count a CPU's memory",
    # another CPU, file system or user
    r"OpenVINO sees this CPU's AVX-512 and asks for kernels that oneDNN must not use",
    r"this CPU or its hypervisor does not let CPUID be trapped",
    r"no bfloat16|this CPU has no bfloat16, or oneDNN must not use it",
    r"products of 8-bit weights saturate in \w+( \w+)* on this CPU: test_saturation has that",
    r"needs g\+\+ and AVX2",
    r"this user may not mount|this file system takes UTF-8 names only",
    # combinations that do not exist, and what longer runs take
    r"has 8 bits a sample|got empty parameter set.*",
    r"FAULT_CASES says how many",
)


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
        if self.refused() and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if refused := self.refused():
            terminalreporter.section("skipped for a reason that tests/helpers/allowed_skips.py does not list", red=True)
            terminalreporter.write_line("\n".join(refused))
