"""Write a package: the whole folder or nothing, and never in place of a folder that is no package."""

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from swin_quant.backends.openvino.engine import without_functions
from swin_quant.backends.openvino.operators import sources
from swin_quant.base import __version__
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.files import compute_sha256, configs_dir, ensure_writable_dir, json_text, read_json, reason
from swin_quant.cards.card import without_paths
from swin_quant.ship.facts import MODEL, OPERATORS, SCHEMA, PackageFacts
from swin_quant.ship.texts import Serving, kserve, openvino_model_server, readme, requirements, settings, triton

MANIFEST = "package.json"
_NOT_COPIED = ("__pycache__", "*.template.*")
_FOR_ONNX = ("cpp", "Dockerfile")


def write_package(facts: PackageFacts, serving: Serving, folder: str | Path, overwrite: bool = False) -> Path:
    """Write the package into `folder`, which must not exist, be empty or, with `overwrite`, be a package.

    The package is written beside `folder` and renamed when it is complete; an interrupt at any moment leaves the
    former folder. SwinQuantError for a disk that fails, or a model that was replaced meanwhile.
    """
    target = Path(os.path.abspath(folder))
    check_place(target, overwrite)
    ensure_writable_dir(target.parent)
    made, old = (target.with_name(f".{target.name}.{secrets.token_hex(8)}.{word}") for word in ("tmp", "old"))
    try:
        made.mkdir()
        _fill(made, facts, serving)
        try:
            if target.exists():
                target.rename(old)
            made.rename(target)
        finally:  # after an error or an interrupt between the two
            if old.exists() and not target.exists():
                old.rename(target)
    except OSError as error:
        raise SwinQuantError(f"{folder}: the package cannot be written: {reason(error)}") from error
    finally:
        for left in (made, old):
            with contextlib.suppress(OSError):
                shutil.rmtree(left)
    return Path(folder)


def check_place(folder: Path, overwrite: bool) -> None:
    """UsageError if `folder` has content, unless it is a package and `overwrite` is set."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UsageError(f"{folder}: is no folder: give ‹output› another name")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{folder}: is there already: give ‹output› another name, or ‹overwrite› to replace a package")
    manifest = folder / MANIFEST
    if not manifest.is_file() or read_json(manifest, "package's manifest").get("schema") != SCHEMA:
        raise UsageError(f"{folder}: holds something else than a package, which is not overwritten: give another name")


def _fill(folder: Path, facts: PackageFacts, serving: Serving) -> None:
    model, record = folder / facts.model, facts.artifact.record
    model.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(facts.artifact.file, model)
    for other in record["others"]:
        shutil.copyfile(facts.artifact.file.with_name(other["file"]), model.with_name(other["file"]))
    copied = {model: record["sha256"]} | {model.with_name(one["file"]): one["sha256"] for one in record["others"]}
    if changed := [copy.name for copy, sha256 in copied.items() if compute_sha256(copy) != sha256]:
        raise SwinQuantError(f"{facts.artifact.file}: {changed[0]} was replaced while it was packaged: try again")
    if facts.file and facts.file.functions and not record["others"]:  # OpenVINO's own reader knows no functions
        if facts.library:  # a copy of the model, the library, and sources with the script that builds it anew
            place = folder / OPERATORS
            place.mkdir()
            shutil.copyfile(model, place / MODEL)
            shutil.copyfile(facts.library, place / "libswin_quant_plugins.so")
            for file in sources().iterdir():
                if file.suffix in (".hpp", ".cpp", ".sh"):
                    shutil.copyfile(file, place / file.name)
        model.write_bytes(without_functions(model))
    left = shutil.ignore_patterns(*_NOT_COPIED, *(() if facts.file else _FOR_ONNX))
    shutil.copytree(configs_dir() / "package", folder, dirs_exist_ok=True, ignore=left)
    texts = {
        "preprocess.json": json_text(facts.preprocessing()),
        "card.json": json_text(without_paths(facts.artifact.card)),
        "README.md": readme(facts, __version__),
        "requirements.txt": requirements(facts),
    }
    if facts.file:
        texts |= {
            "cpp/settings.h": settings(facts),
            f"{facts.folder}/config.pbtxt": triton(facts, serving),
            "ovms.json": openvino_model_server(facts, serving),
            "kserve.yaml": kserve(facts, serving),
        }
    if labels := facts.served.labels:
        texts[facts.labels] = "".join(f"{label}\n" for label in labels)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")  # a card may hold any characters
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): compute_sha256(path) for path in files}
    (folder / MANIFEST).write_text(json_text({**facts.manifest(), "files": hashes}))
