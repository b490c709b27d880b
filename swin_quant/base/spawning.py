"""Start fresh processes from a user's script."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def without_script() -> Iterator[None]:
    """Processes spawned inside do not run the script again that has no `if __name__ == "__main__"`: it would run as a
    whole, and start processes in its turn. A script with that line may register plugins, which the processes need."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None) if main.__spec__ is None else None
    guarded = True
    with suppress(OSError):
        guarded = file is None or "__main__" in Path(file).read_text(encoding="utf-8", errors="replace")
    if guarded:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
