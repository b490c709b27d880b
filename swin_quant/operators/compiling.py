"""Compiles the C++ of operators at first use, once for a user, and keeps the library in a folder of the user's own.

What is loaded is code: the folder must be the user's alone, and a library is known by the hash of its sources and of
what it was built for, and by its own.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, one_line
from swin_quant.base.files import one_at_a_time, read_json, reason, sha256_of, write_json
from swin_quant.base.progress import log

_COMPILERS = ("g++", "c++", "clang++")
_SECONDS = 600


def compiled(sources: Path, what: str, built_for: Sequence[str]) -> Path:
    """The library that `build.sh` in `sources` builds, which passed `selftest.py` there.

    `what`: its content, for messages. `built_for`: what a library holds for: versions, the kind of CPU. SwinQuantError
    says in a line why there is none.
    """
    files = sorted(file for file in sources.iterdir() if file.suffix in (".cpp", ".hpp", ".sh", ".py"))
    told = hashlib.sha256("\0".join(built_for).encode())
    for file in files:
        told.update(f"\0{file.name}\0".encode() + file.read_bytes())
    folder = own_folder()
    library = folder / f"{sources.name}-{told.hexdigest()[:24]}.so"
    if not _is_whole(library):
        with one_at_a_time(folder):  # who waited finds it built
            if not _is_whole(library):
                _build(sources, library, what)
    return library


def own_folder() -> Path:
    """The user's folder of libraries, made with mode 0700. SwinQuantError where others could write into it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "swin-quant" / "operators"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise SwinQuantError(f"{folder}: {reason(error)}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SwinQuantError(f"{folder}: is not a folder of yours: move it away")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise SwinQuantError(f"{folder}: others have access: `chmod 700` it if what lies in it is yours, or remove it")
    return folder


def compiler() -> str:
    """The command of the C++ compiler: CXX, else the first that is installed. SwinQuantError where there is none."""
    given = os.environ.get("CXX", "").split()
    if given and not shutil.which(given[0]):
        raise SwinQuantError(f"CXX is {' '.join(given)}, which is not installed")
    found = " ".join(given) or next(filter(shutil.which, _COMPILERS), None)
    if not found:
        raise SwinQuantError("no C++ compiler is installed")
    return found


def _is_whole(library: Path) -> bool:
    """Whether it lies there as it was built. SwinQuantError for one that failed its self-test, which stays refused."""
    if (failed := library.with_suffix(".failed")).exists():
        raise SwinQuantError(f"its self-test failed before (remove {failed} to try again)")
    try:
        return bool(sha256_of(library) == read_json(library.with_suffix(".json"), "record of a library")["sha256"])
    except (SwinQuantError, TypeError, KeyError):
        return False


def _build(sources: Path, library: Path, what: str) -> None:
    """Build, test, and only then put into its place."""
    command, start = compiler(), time.monotonic()
    try:
        made = Path(tempfile.mkdtemp(dir=library.parent))
    except OSError as error:
        raise SwinQuantError(f"{library.parent}: {reason(error)}") from error
    try:
        environment = os.environ | {"CXX": command, "PYTHON": sys.executable}
        if said := _failure(["sh", str(sources / "build.sh"), str(made)], environment):
            raise SwinQuantError(f"{command} fails: {said}")
        (built,) = made.glob("*.so")
        if said := self_test(sources, built):
            library.with_suffix(".failed").write_text(f"{said}\n")
            raise SwinQuantError(f"its self-test failed: {said}")
        write_json(library.with_suffix(".json"), {"sha256": sha256_of(built)})
        built.replace(library)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "its build wrote no library"
        raise SwinQuantError(f"{library.parent}: {why}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("%s: compiled for this CPU in %.0f s, once: %s", what, time.monotonic() - start, library)


def self_test(sources: Path, library: Path) -> str | None:
    """What `selftest.py` says against a library; None if it passes."""
    return _failure([sys.executable, str(sources / "selftest.py"), str(library)], dict(os.environ))


def _failure(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """The line in which a program says why it fails: its first error, else its last line. None if it does not fail."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if " error: " in line] or lines[-1:]
    return one_line(errors[0])[:200] if errors else f"it ended with {done.returncode}"
