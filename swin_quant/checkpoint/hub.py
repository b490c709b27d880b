"""The weights of a repository on huggingface.co: from the hub's cache, or downloaded into it.

The cache comes first: what is in it needs no network, and does not change from one run to the next.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import parts_of
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
    """The weights of a repository, with their descriptions beside them. Errors name `asked`, as the user wrote it."""
    from huggingface_hub import constants, errors

    try:
        with _quietly():
            file = _fetch(repository, revision, cached=True)
            if file is None:
                log.info("%s: is not in the cache, so huggingface.co is asked", asked)  # half a minute if it is away
                file = _fetch(repository, revision, cached=False)
    except errors.HFValidationError as error:
        raise UsageError(f"{asked}: {repository!r:.80} is no name of a repository, which is owner/name") from error
    except OSError as error:
        texts = [text for name, text in _PROBLEMS if isinstance(error, getattr(errors, name))]
        absent = _ABSENT.format(cache=constants.HF_HUB_CACHE)
        unknown = f"cannot be downloaded: {(str(error).splitlines() or [type(error).__name__])[0]:.200}"
        problem = texts[0].format(repository=repository, absent=absent) if texts else unknown
        raise SwinQuantError(f"{asked}: {problem}") from error
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
                    raise  # there is no network
    if not found or found[0].name not in WEIGHTS:
        return None
    try:
        for part in parts_of(found[0]):
            hf_hub_download(repository, part.name, revision=revision, local_files_only=cached)
    except errors.LocalEntryNotFoundError:
        if not cached:
            raise
        return None
    return found[0]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences the hub's line on every retry: the caller reports one error."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
