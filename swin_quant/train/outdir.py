"""The output folder of a run: refused when it is another run's, found again when a run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swin_quant.base.errors import UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.train.recipe import Recipe
from swin_quant.train.record import EPOCHS, STEPS, read_table
from swin_quant.train.snapshot import Check, Snapshots

# Keys of a recipe that a resumed run may have changed: they do not change what is computed (a compiler changes last
# bits and the draws of drop path, as another machine may; who stays with the command keeps the bits).
_FREE = (
    *("name", "description", "patience", "save_minutes", "keep"),
    *("batch_size", "accumulation_steps", "memory", "compile"),
)
_LATER = ("teacher_sha256", "pictures_sha256", "preprocess")  # snapshots of before they were kept say nothing of them


def settings_of(recipe: Recipe, world_size: int, seed: int, **more: Any) -> dict[str, Any]:
    """What a run must have in common with its snapshot to go on from it, by dotted key.

    Ranks and accumulation steps may be traded for each other: together they decide which pictures make a step.
    """
    settings: dict[str, Any] = {}
    for key, value in recipe.to_dict().items():
        if key not in _FREE:
            parts = value.items() if isinstance(value, dict) else [("", value)]
            settings |= {f"{key}.{name}".rstrip("."): item for name, item in parts}
    batch = {"batch_size": recipe.batch_size, "accumulation_steps x ranks": recipe.accumulation_steps * world_size}
    return settings | batch | {"seed": seed} | more


def check_free(folder: Path, resume: bool, overwrite: bool) -> None:
    """UsageError when the folder holds a run and neither `resume` nor `overwrite` is said."""
    if _holds_run(folder) and not (resume or overwrite):
        raise UsageError(
            f"{folder}: holds another run: ‹continue› goes on with it, ‹overwrite› replaces it, or another ‹output›"
        )


def open_folder(
    folder: Path, settings: dict[str, Any], resume: bool, overwrite: bool, keep: int, check: Check
) -> dict[str, Any] | None:
    """The snapshot to go on from, or None for a fresh start in `folder`, whose former run is then gone.

    `check` raises for a snapshot that is not of this model. UsageError as of `check_free`, when the run to resume had
    other settings, and when it left results and no snapshot. One that ended before either begins again.
    """
    check_free(folder, resume, overwrite)
    snapshots = Snapshots(folder / "snapshots", keep)
    snapshots.sweep()
    content = snapshots.newest(check) if resume and not overwrite else None
    if content is not None:
        _compare(content["settings"], settings, folder)
        log.info("going on after step %d of epoch %d", content["position"]["step"], content["position"]["epoch"] + 1)
        return content
    if resume and not overwrite and _has_results(folder):
        raise UsageError(f"{folder}: has results of a run and no snapshot to go on from: ‹overwrite› starts anew")
    ensure_writable_dir(folder)
    snapshots.clear()
    for name in (STEPS, EPOCHS):
        (folder / name).unlink(missing_ok=True)
    return None


def _holds_run(folder: Path) -> bool:
    snapshots = Snapshots(folder / "snapshots")
    files = *snapshots.newest_first(), snapshots.best_file, folder / STEPS, folder / EPOCHS
    return any(file.exists() for file in files)


def _has_results(folder: Path) -> bool:
    epochs = folder / EPOCHS
    return Snapshots(folder / "snapshots").best_file.exists() or (epochs.exists() and bool(read_table(epochs)))


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Whoever interrupts what is done inside is told how to go on, once there is a snapshot to go on from."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not Snapshots(folder / "snapshots").newest_first():
            raise
        raise KeyboardInterrupt("the run is saved: go on with the same command and ‹continue›") from stop


def _compare(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    unsaid = {key for key in now if key not in before and key.partition(".")[0] in _LATER}
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in unsaid]
    if differing:
        changed = listed(f"{key} {before.get(key)!s:.80} -> {now.get(key)!s:.80}" for key in differing)
        raise UsageError(f"{folder}: its run cannot go on with other settings: {changed}; ‹overwrite› starts anew")
