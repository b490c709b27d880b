"""Read an export back: check every tensor against the list of its manifest, and undo every layout."""

from dataclasses import dataclass, field

from torch import Tensor

from swin_quant.backends.artifact import Artifact
from swin_quant.backends.fastertransformer.limits import Case
from swin_quant.backends.fastertransformer.manifest import Manifest, manifest_name, read_manifest
from swin_quant.backends.fastertransformer.slots import HEAD, Slot, slots
from swin_quant.backends.fastertransformer.weights import DTYPES, from_stored
from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.reading import reads
from swin_quant.checkpoint import read_state_dict


@dataclass(frozen=True)
class Stored:
    """An export as read: `tensors` by slot name, in their stored types, without layout; `head` in float32."""

    case: Case
    manifest: Manifest
    entries: list[Slot]
    tensors: dict[str, Tensor] = field(repr=False)
    head: tuple[Tensor, Tensor] = field(repr=False)


@reads("FasterTransformer export", lambda artifact: artifact.file)
def read_export(artifact: Artifact) -> Stored:
    """The content of an artifact of this backend. SwinQuantError names the entry that is missing or wrong."""
    if artifact.record["backend"] != "fastertransformer":
        raise SwinQuantError(f"{artifact.file}: is an export of backend {artifact.record['backend']!r:.40}")
    file = artifact.file
    manifest, case = read_manifest(file.with_name(manifest_name(file)))
    if manifest["file"] != file.name:
        raise SwinQuantError(f"{file}: its manifest is that of {manifest['file']!r:.80}")
    entries = slots(case.g, case.form)
    state, _ = read_state_dict(file)
    if strange := sorted(state.keys() ^ {*(slot.key for slot in entries), *HEAD}):
        raise SwinQuantError(f"{file}: missing or unknown tensors: {listed(strange, 3)}; export again")
    for slot in entries:
        shape = (slot.source[0] * slot.source[1],) if slot.container else slot.shape
        _check(str(file), slot.key, state[slot.key], slot.dtype, shape)
    channels = case.g.embed_dim * 2 ** (len(case.g.depths) - 1)
    for name, shape in zip(HEAD, [(case.g.classes, channels), (case.g.classes,)], strict=True):
        _check(str(file), name, state[name], "float32", shape)
    try:
        tensors = {slot.name: from_stored(slot, state[slot.key], case.g) for slot in entries}
    except SwinQuantError as error:
        raise SwinQuantError(f"{file}: {error}") from error
    return Stored(case, manifest, entries, tensors, (state[HEAD[0]], state[HEAD[1]]))


def _check(file: str, key: str, tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not DTYPES[dtype] or tuple(tensor.shape) != shape:
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise SwinQuantError(f"{file}: {key} is {found}, must be {dtype} {list(shape)}; export again")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise SwinQuantError(f"{file}: {key} holds NaN or Inf; export again")
