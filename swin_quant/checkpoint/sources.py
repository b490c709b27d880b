"""Checkpoints by the names that timm and Hugging Face give them.

timm:swin_tiny_patch4_window7_224.ms_in1k     a pretrained model of timm
hf:microsoft/swin-tiny-patch4-window7-224     a repository on huggingface.co; @ and a revision may follow
snapshot/                                     a folder that holds what such a repository does
model-00001-of-00002.safetensors              one part of the weights: the index beside it names every part
"""

import difflib
import logging
import os
import re
from pathlib import Path

from swin_quant.base.compat import import_timm
from swin_quant.base.errors import SwinQuantError, UsageError, first_line, listed
from swin_quant.base.files import INDEX, list_parts
from swin_quant.base.progress import log

WEIGHTS = tuple(
    "model.safetensors pytorch_model.bin pytorch_model.pth model.pth model.safetensors.index.json "
    "pytorch_model.bin.index.json".split()
)
"""Names of weights files in repositories, in the order in which they are looked for."""
_BESIDE = ("config.json", "preprocessor_config.json")  # descriptions of the model and of its preprocessing


def download(repository: str, revision: str | None, asked: str) -> Path:
    """The weights of a repository on huggingface.co, with their descriptions beside them.

    The hub's cache comes first: it needs no network, and does not change from one run to the next. Errors name `asked`.
    """
    from huggingface_hub import constants, errors

    try:
        file = _fetch(repository, revision, cached=True)
        if file is None:
            told = "%s: is not in the cache, so huggingface.co is asked (half a minute if it cannot be reached)"
            log.info(told, asked)
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each retry
            file = _fetch(repository, revision, cached=False)
    except errors.HFValidationError as error:
        raise UsageError(f"{asked}: {repository!r:.80} is no name of a repository, which is owner/name") from error
    except OSError as error:
        problem = f"huggingface.co refuses {repository} ({first_line(error)}): check its name and terms"
        if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            problem = f"is not in the cache {constants.HF_HUB_CACHE}, and huggingface.co cannot be reached"
            problem += ": download it elsewhere, and give the folder of its snapshot, or set HF_HOME to a copy"
        raise SwinQuantError(f"{asked}: {problem}") from error
    if file is None:
        raise SwinQuantError(f"{asked}: {repository} has none of {listed(WEIGHTS)}")
    return file


def _fetch(repository: str, revision: str | None, cached: bool) -> Path | None:
    """The first of WEIGHTS that exists, with its parts and the files beside it; `cached`: without the network."""
    from huggingface_hub import errors, hf_hub_download

    def get(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(repository, name, revision=revision, local_files_only=cached))
        except errors.EntryNotFoundError as error:
            if isinstance(error, errors.LocalEntryNotFoundError) and not cached:
                raise  # no network
            return None

    file = next(filter(None, map(get, WEIGHTS)), None)
    if file is None or None in [get(part.name) for part in list_parts(file)]:
        return None
    for name in _BESIDE:
        get(name)
    return file


_CACHED = re.compile(r"models--(?:(?P<owner>[^/]+?)--)?(?P<name>[^/]+)/snapshots/[^/]+/[^/]+")
_PART = re.compile(r"(?P<stem>.+)-\d+-of-\d+(?P<end>\.\w+)")


def local_file(checkpoint: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint: a path itself, the weights in a folder, or for a name the file in the hub's cache.

    SwinQuantError for a name that is neither cached nor downloadable, UsageError where timm has no such name.
    """
    text = os.fspath(checkpoint)
    kind, _, name = text.partition(":")
    if kind not in ("timm", "hf") or os.path.exists(text):
        return _weights_in(Path(text))
    if os.path.isdir(name):
        return _weights_in(Path(name))
    if kind == "timm":
        name = _timm_repository(name, text)
    repository, _, revision = name.partition("@")
    return download(repository, revision or None, text)


def choose_name(file: Path) -> str:
    """A name for a checkpoint: its file's, or its repository's if all files there have the same name."""
    cached = _cached(file)
    name = cached["name"] if cached else file.parent.name if file.name in WEIGHTS else file.stem.removesuffix("_calib")
    name = re.sub(r"[/\\\x00-\x1f\ud800-\udfff]", "_", name)[:200]
    return name if name.strip(".") else "swin"


def timm_name(file: Path) -> str | None:
    """timm's name for a file in the hub's cache, if it has one."""
    cached = _cached(file)
    if cached is None or cached["owner"] != "timm":
        return None
    return cached["name"] if import_timm().models.is_model_pretrained(cached["name"]) else None


def _cached(file: Path) -> re.Match[str] | None:
    return _CACHED.fullmatch("/".join(file.parts[-4:]))


def _weights_in(path: Path) -> Path:
    """The weights in a snapshot of a repository, the index for a part; any other path unchanged."""
    if (part := _PART.fullmatch(path.name)) and path.is_file():
        index = path.with_name(f"{part['stem']}{part['end']}{INDEX}")
        return index if index.is_file() else path
    if not path.is_dir():
        return path
    return next((path / name for name in WEIGHTS if (path / name).is_file()), path)


def _timm_repository(name: str, text: str) -> str:
    """The repository of timm's weights `name`, or of an architecture's default weights."""
    models = import_timm().models
    if models.is_model_pretrained(name):
        return models.get_pretrained_cfg(name).hf_hub_id
    close = listed(difflib.get_close_matches(name, models.list_models(pretrained=True), n=3, cutoff=0.3))
    raise UsageError(f"{text}: timm has no weights by that name{close and f'; it has {close}'}")
