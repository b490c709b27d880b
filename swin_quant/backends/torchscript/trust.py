"""A TorchScript file is code: whoever runs one is told so, unless this process wrote it."""

from swin_quant.backends.artifact import Artifact
from swin_quant.base.progress import log

_known: set[str] = set()  # hashes of files, written here or told of


def written(artifact: Artifact) -> Artifact:
    """`artifact`, which this process has traced."""
    _known.add(artifact.record["sha256"])
    return artifact


def tell(artifact: Artifact) -> None:
    """Log once that the file runs as code. Its run card, which may come from the same stranger, vouches for nothing."""
    if artifact.record["sha256"] not in _known:
        _known.add(artifact.record["sha256"])
        log.warning("%s: is TorchScript, which is code and runs with your rights: run only what you or somebody you "
                    "trust exported", artifact.file)  # fmt: skip
