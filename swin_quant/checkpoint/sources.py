"""Checkpoints by the names that timm and Hugging Face give them.

timm:swin_tiny_patch4_window7_224.ms_in1k     a pretrained model of timm
hf:microsoft/swin-tiny-patch4-window7-224     a repository on huggingface.co; @ and a revision may follow
snapshot/                                     a folder that holds what such a repository does
model-00001-of-00002.safetensors              one part of the weights: the index beside it names every part
"""

import difflib
import os
import re
import shlex
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
_PROBLEMS = (  # class in huggingface_hub.errors -> message, the more special first
    ("GatedRepoError", "{repository} wants its terms accepted: do so on huggingface.co, then `hf auth login`"),
    ("RevisionNotFoundError", "{repository} has no such revision"),
    ("RepositoryNotFoundError", "huggingface.co has no {repository}, or it is private: `hf auth login`"),
    ("LocalEntryNotFoundError", "{absent}"),
    ("OfflineModeIsEnabled", "{absent}"),
)
_ABSENT = (
    "is not in the cache {cache}, and huggingface.co cannot be reached: download it where it can, and give the file or "
    "the folder of its snapshot, or set HF_HOME to a copy of that cache"
)


def download(repository: str, revision: str | None, asked: str) -> Path:
    """The weights of a repository on huggingface.co, with their descriptions beside them.

    The hub's cache comes first: its files need no network, and do not change from one run to the next. Errors name
    `asked`, as the user wrote it.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # silences a line on every retry: one error is reported
    try:
        file = _fetch(repository, revision, cached=True)
        if file is None:
            # Takes half a minute if the hub is unreachable
            log.info("%s: is not in the cache, so huggingface.co is asked", asked)
            file = _fetch(repository, revision, cached=False)
    except errors.HFValidationError as error:
        raise UsageError(f"{asked}: {repository!r:.80} is no name of a repository, which is owner/name") from error
    except OSError as error:
        texts = [text for name, text in _PROBLEMS if isinstance(error, getattr(errors, name))]
        absent = _ABSENT.format(cache=constants.HF_HUB_CACHE)
        unknown = f"cannot be downloaded: {first_line(error)}"
        problem = texts[0].format(repository=repository, absent=absent) if texts else unknown
        raise SwinQuantError(f"{asked}: {problem}") from error
    finally:
        logging.set_verbosity(level)
    if file is None:
        raise SwinQuantError(f"{asked}: {repository} has none of {listed(WEIGHTS)}")
    return file


def _fetch(repository: str, revision: str | None, cached: bool) -> Path | None:
    """The first of WEIGHTS that exists, with the files beside it; `cached`: without the network."""
    from huggingface_hub import errors, hf_hub_download

    found: list[Path] = []
    for name in (*WEIGHTS, *_BESIDE):
        if name in _BESIDE or not found:
            try:
                found.append(Path(hf_hub_download(repository, name, revision=revision, local_files_only=cached)))
            except errors.EntryNotFoundError as error:
                if isinstance(error, errors.LocalEntryNotFoundError) and not cached:
                    raise  # no network
    if not found or found[0].name not in WEIGHTS:
        return None
    try:
        for part in list_parts(found[0]):
            hf_hub_download(repository, part.name, revision=revision, local_files_only=cached)
    except errors.LocalEntryNotFoundError:
        if not cached:
            raise
        return None
    return found[0]


_KINDS = ("timm", "hf")
_CACHED = re.compile(r"models--(?:(?P<owner>[^/]+?)--)?(?P<name>[^/]+)/snapshots/[^/]+/[^/]+")
_PART = re.compile(r"(?P<stem>.+)-\d+-of-\d+(?P<end>\.\w+)")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # of peft, which reading them refuses by name
# Folders of distributed training: a name inside -> the folder's kind, and the module that makes one file of it
_FOLDERS = (
    (".metadata", "a distributed checkpoint of torch", "torch.distributed.checkpoint.format_utils dcp_to_torch"),
    ("global_step*/*mp_rank_*", "a checkpoint of DeepSpeed", "deepspeed.utils.zero_to_fp32"),
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed", "deepspeed.utils.zero_to_fp32"),
)


def local_file(checkpoint: str | os.PathLike[str]) -> Path:
    """The file of a checkpoint: a path itself, the weights in a folder, or for a name the file in the hub's cache.

    SwinQuantError for a name that is neither cached nor downloadable, UsageError where timm has no such name.
    """
    text = os.fspath(checkpoint)
    kind, _, name = text.partition(":")
    if kind not in _KINDS or os.path.exists(text):
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
    """The weights in a snapshot of a repository, the index for a part; any other path unchanged.

    SwinQuantError for weights that are scattered over a folder, with the command that makes one file of them.
    """
    inside = path.suffix == ".distcp" or path.name == ".metadata" or re.match("global_step|.*mp_rank_", path.name)
    for folder in (path, path.parent, path.parent.parent)[: 3 if inside else 1]:
        for name, what, module in _FOLDERS:
            if folder.is_dir() and next(folder.glob(name), None):
                command = f"python -m {module} {shlex.quote(str(folder))} OUT.pth"
                raise SwinQuantError(f"{path}: is {what} in parts: make one file of it by `{command}`, and give that")
    if (part := _PART.fullmatch(path.name)) and path.is_file():
        index = path.with_name(f"{part['stem']}{part['end']}{INDEX}")
        return index if index.is_file() else path
    if not path.is_dir():
        return path
    return next((path / name for name in (*WEIGHTS, *_ADAPTERS) if (path / name).is_file()), path)


def _timm_repository(name: str, text: str) -> str:
    """The repository of timm's weights `name`, or of an architecture's default weights."""
    timm = import_timm()
    modules = ("swin_transformer", "swin_transformer_v2")  # named first
    swins = [each for module in modules for each in timm.list_models(module=module, pretrained=True)]
    known = list(dict.fromkeys([*swins, *timm.list_models(pretrained=True)]))
    architecture, _, tag = name.partition(".")
    tags = [each for each in known if each.partition(".")[0] == architecture]
    if tags and (not tag or name in tags):
        return timm.get_pretrained_cfg(name).hf_hub_id
    alike = ([each for each in known if each.startswith(name[:length])] for length in range(len(name), 3, -1))
    close = tags or next(filter(None, alike), []) or difflib.get_close_matches(name, known, n=3, cutoff=0.3) or known
    raise UsageError(f"{text}: timm has no weights by that name; it has {listed(close)}")
