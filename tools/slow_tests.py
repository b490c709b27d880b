"""Write tests/slow.txt, the tests that `make test` leaves out, from what pytest prints with `--durations=0`.

    make slow-tests

A test is listed if a case of it, or its setup, took half a second. What only an earlier test of its file set up counts
for that one: run it again if `make test` grows.
"""

import re
import sys
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "tests" / "slow.txt"
SLOW_S = 0.5


def main() -> None:
    found = re.findall(r"^ *([\d.]+)s (?:setup|call) +(\S+?::\w+)", sys.stdin.read(), re.MULTILINE)
    if not found:
        sys.exit("no durations on standard input: pytest --durations=0 prints them")
    slow = {name for seconds, name in found if float(seconds) >= SLOW_S}
    LIST.write_text("".join(f"{name}\n" for name in sorted(slow)))
    print(f"{LIST}: {len(slow)} tests of {SLOW_S} s and more")


if __name__ == "__main__":
    main()
