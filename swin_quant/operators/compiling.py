"""Compile the C++ of operators at first use, once for a user, and keep the library in the user's own folder.

A library runs as code: the folder must belong to the user alone. Its name has a hash of the sources and the platform,
and a record beside it has its own hash.
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
    """The library that `build.sh` in `sources` builds and `selftest.py` there has tested.

    `what`: its content, for messages. `built_for`: versions and the kind of CPU that it holds for. SwinQuantError says
    in one line why there is none.
    """
    files = sorted(file for file in sources.iterdir() if file.suffix in (".cpp", ".hpp", ".sh", ".py"))
    digest = hashlib.sha256("\0".join(built_for).encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    folder = own_folder()
    library = folder / f"{sources.name}-{digest.hexdigest()[:24]}.so"
    if not _is_whole(library):
        with one_at_a_time(folder):  # a process that waited finds it built
            if not _is_whole(library):
                _build(sources, library, what)
    return library


def own_folder() -> Path:
    """The user's folder of libraries, made with mode 0700. SwinQuantError if others have access."""
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
    """The C++ compiler's command: CXX, else the first that is installed. SwinQuantError if there is none."""
    command = os.environ.get("CXX", "").split()
    if command and not shutil.which(command[0]):
        raise SwinQuantError(f"CXX is {' '.join(command)}, which is not installed")
    found = " ".join(command) or next(filter(shutil.which, _COMPILERS), None)
    if not found:
        raise SwinQuantError("no C++ compiler is installed")
    return found


def _is_whole(library: Path) -> bool:
    """Whether a library is there as it was built. SwinQuantError if it failed its self-test, after which it stays
    refused."""
    if (failed := library.with_suffix(".failed")).exists():
        raise SwinQuantError(f"its self-test failed before (remove {failed} to try again)")
    try:
        return bool(sha256_of(library) == read_json(library.with_suffix(".json"), "record of a library")["sha256"])
    except (SwinQuantError, TypeError, KeyError):
        return False


def _build(sources: Path, library: Path, what: str) -> None:
    """Build and test a library, then move it to its place."""
    command, start = compiler(), time.monotonic()
    try:
        made = Path(tempfile.mkdtemp(dir=library.parent))
    except OSError as error:
        raise SwinQuantError(f"{library.parent}: {reason(error)}") from error
    try:
        environment = os.environ | {"CXX": command, "PYTHON": sys.executable}
        if failure := _failure(["sh", str(sources / "build.sh"), str(made)], environment):
            raise SwinQuantError(f"{command} fails: {failure}")
        (built,) = made.glob("*.so")
        if failure := self_test(sources, built):
            library.with_suffix(".failed").write_text(f"{failure}\n")
            raise SwinQuantError(f"its self-test failed: {failure}")
        write_json(library.with_suffix(".json"), {"sha256": sha256_of(built)})
        built.replace(library)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "its build wrote no library"
        raise SwinQuantError(f"{library.parent}: {why}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("%s: compiled for this CPU in %.0f s, once: %s", what, time.monotonic() - start, library)


def self_test(sources: Path, library: Path) -> str | None:
    """The failure that `selftest.py` finds in a library; None if it passes."""
    return _failure([sys.executable, str(sources / "selftest.py"), str(library)], dict(os.environ))


def _failure(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """The line that says why a program fails: its first error, else its last line. None if it succeeds."""
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
