"""Files with the finished parts of a long pass, from which an interrupted pass goes on to the same bits.

A file's name is a hash of all that its content depends on. So parts for other weights, ranges, pictures or options are
never found, and nothing needs to be compared.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from swin_quant.base.errors import SwinQuantError
from swin_quant.base.files import atomic_write_bytes, read_bounded
from swin_quant.base.progress import log
from swin_quant.base.reading import reading
from swin_quant.quant.passes.trial import copy_state
from swin_quant.quant.quantizer import Quantizer

_MAX_BYTES = 8 << 30


@dataclass(frozen=True)
class Scratch:
    """A folder for a pass's files, made with the first file; None: no files. `writes`: only on rank 0."""

    folder: Path | None = None
    writes: bool = True

    def known(self, key: str, names: Collection[str], device: torch.device) -> dict[str, Tensor] | None:
        """The tensors `names` stored under `key`; None without a readable file."""
        path = self.folder and self.folder / f"{key}.safetensors"
        if not path or not path.is_file():
            return None
        try:
            with reading(path, "state of a pass"):
                found = safetensors.torch.load(read_bounded(path, "state of a pass", _MAX_BYTES))
                if found.keys() == set(names):
                    return {name: value.to(device) for name, value in found.items()}
        except SwinQuantError:
            pass
        log.warning("%s: cannot be read; done anew", path)
        return None

    def keep(self, key: str, values: Mapping[str, Tensor]) -> None:
        """Store `values` under `key`."""
        if self.folder and self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            content = {name: value.detach().cpu().contiguous() for name, value in values.items()}
            atomic_write_bytes(self.folder / f"{key}.safetensors", safetensors.torch.save(content))

    def clear(self) -> None:
        """Remove the files, and the folder if it is then empty."""
        if self.folder and self.writes:
            for path in self.folder.glob("*.safetensors"):
                path.unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()


def compute_key(models: Sequence[nn.Module], images: Sequence[Tensor], plain: Any) -> str:
    """The hash of networks' weights, ranges and settings, of pictures, and of `plain` data."""
    nodes = [node for model in models for node in model.modules() if isinstance(node, Quantizer)]
    settings = [astuple(node.setting) for node in nodes]
    digest = hashlib.sha256(json.dumps([plain, settings, torch.__version__], sort_keys=True).encode())
    for name, value in (*(pair for model in models for pair in copy_state(model).items()), *(("", b) for b in images)):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
