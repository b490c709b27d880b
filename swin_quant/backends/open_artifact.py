"""Open an artifact whose run card and file agree."""

from pathlib import Path

from swin_quant.backends.artifact import Artifact, read_artifact
from swin_quant.backends.backend import function
from swin_quant.backends.registry import backends


def open_artifact(path: str | Path) -> Artifact:
    """The artifact at `path`. SwinQuantError as in `read_artifact`, and where the card contradicts what its backend
    wrote into the file: the hash in the card vouches for the file alone."""
    artifact = read_artifact(path)
    backend = backends().get(artifact.record["backend"])
    if backend and backend.check_card:
        function(backend.check_card)(artifact)
    return artifact
