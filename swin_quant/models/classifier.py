"""The two types of `models`: what a network must offer, and the entry of its architecture in the registry."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.family import Family
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.quant.passes.places import Exchange


class Classifier(nn.Module):
    """A network from pictures [B, in_chans, image_size, image_size] to logits [B, classes].

    `architecture` is its entry in the registry, set by `build_model`: which parts of it are blocks, stages, pairs.
    `maps`: the side of the map of tokens in each stage, where there are maps.
    `output_kind`: what it gives. Without logits it has no classes, and `left_out` (a pattern of `re`) says which keys
    of a checkpoint it has no use for; with maps, those of `output_stages`, it takes pictures
    [B, in_chans, H, W] of any size.
    `weights`: which set of weights it takes from a file that holds several (MODEL.WEIGHTS).
    `own_units`, `own_exchanges`, `own_stages`: those that a network of no known structure finds in itself; others have
    them from their architecture (`registry`).
    """

    architecture: "Architecture | None" = None
    output_kind = LOGITS
    left_out: str | None = None
    weights = ""
    output_stages: tuple[int, ...] = ()
    own_units: tuple[str, ...] = ()
    own_stages: tuple[str, ...] = ()
    own_exchanges: tuple[Exchange, ...] = ()

    def __init__(self, image_size: int, in_chans: int, classes: int, maps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.image_size, self.in_chans, self.classes, self.maps = image_size, in_chans, classes, maps

    def check(self, images: Tensor) -> None:
        """UsageError for pictures of another size than it was built for, but where it gives maps: some networks would
        answer, with other rows than there are pictures. Tensors without values ask what depends on the size."""
        wanted = (self.in_chans, self.image_size, self.image_size)
        if self.output_kind != FEATURES and not images.is_meta and tuple(images.shape[1:]) != wanted:
            raise UsageError(
                f"pictures {list(images.shape)}: this model takes [B, {', '.join(map(str, wanted))}]: prepare them as "
                "its `preprocess` says"
            )


@dataclass(frozen=True)
class Architecture:
    """An entry of the registry: a family, and the network that a config of it describes.

    `build(cfg)` gives a `Classifier` with freshly initialised weights, nodes off. `blocks` are the parts that repeat,
    in the order of the forward pass: what is computed anew to save memory, sharded, and counted by layer decay.
    `stages` are those whose outputs are features. `pairs`: a norm and the linears that read its output and nothing
    else does, so that a factor can move from one to the others; stars stand for the same words in all. `exchanges`:
    other places of such a kind; `streams(model)`: those of residual streams, which depend on the depth. `padded`: what
    is given zeros beside tokens where a map has no whole windows: no offset may move into it. `no_decay`: what is in
    the names of parameters that weight decay leaves alone, beside norms and biases. `rewrites`: the module that
    rewrites it for ONNX, or the name of one of the exporter's own; None: the generic export is all it needs.
    `backbone` names a function "module:function" from a config to the model that gives maps; None: there is none.
    `embedding` one to the model that gives what the head reads; None: that without its `head`.
    """

    family: Family
    build: Callable[[CfgNode], Classifier]
    blocks: str | None = None
    stages: str | None = None
    pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    streams: Callable[[nn.Module], Iterable[Exchange]] | None = None
    padded: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    no_decay: tuple[str, ...] = ()
    rewrites: str | None = None
    backbone: str | None = None
    embedding: str | None = None

    @property
    def name(self) -> str:
        """MODEL.TYPE of its configs."""
        return self.family.name
