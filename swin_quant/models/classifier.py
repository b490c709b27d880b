"""The interface of every network, `Classifier`, and the entry of its `Architecture` in the registry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from yacs.config import CfgNode

from swin_quant.base.errors import UsageError
from swin_quant.config.family import Family
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.data.inputs import Inputs
from swin_quant.quant.passes.places import Exchange


class Classifier(nn.Module):
    """A network from pictures [B, *input_shape], such as [B, 3, 224, 224], to logits [B, classes].

    `input_shape`: of one input, channels first: (channels, height, width) for pictures.
    `architecture`: its entry in the registry, set by `build_model`, which names its blocks, stages and pairs.
    `output_kind`: the kind of output. Without logits there are no classes, and `left_out` (a pattern of `re`) matches
    the keys of a checkpoint that it does not need. Maps are of `output_stages`, or have `output_names`.
    `convert_names`: gives the weights of another publisher the names of this network.
    `any_size`: whether it takes pictures of any height and width; None: if it gives maps.
    `weights_set`: the set of weights to take from a file that holds several (MODEL.WEIGHTS).
    `own_units`, `own_exchanges`, `own_stages`: found by tracing in a network of unknown structure; a known architecture
    has its own (`registry`).
    `parameters_read`: the keys of parameters that a captured forward pass reads without their module.
    `inputs`: several inputs by name, which it takes packed, [B, N]; None: it takes one.
    """

    architecture: "Architecture | None" = None
    output_kind = LOGITS
    left_out: str | None = None
    convert_names: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    weights_set = ""
    output_stages: tuple[int, ...] = ()
    output_names: tuple[str, ...] = ()
    any_size: bool | None = None
    own_units: tuple[str, ...] = ()
    own_stages: tuple[str, ...] = ()
    own_exchanges: tuple[Exchange, ...] = ()
    parameters_read: frozenset[str] = frozenset()
    inputs: Inputs | None = None

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.input_shape, self.classes = tuple(input_shape), classes

    @property
    def in_chans(self) -> int:
        return self.input_shape[0]

    @property
    def takes_any_size(self) -> bool:
        return self.output_kind == FEATURES if self.any_size is None else self.any_size

    def check(self, images: Tensor) -> None:
        """UsageError for pictures of another size than the network was built for, unless it takes any.

        Some networks would answer with another number of rows. Meta tensors pass: they probe how shapes depend on it.
        """
        if not self.takes_any_size and not images.is_meta and tuple(images.shape[1:]) != self.input_shape:
            raise UsageError(
                f"pictures {list(images.shape)}: this model takes [B, {', '.join(map(str, self.input_shape))}]: "
                "prepare them as its `preprocess` says"
            )


@dataclass(frozen=True)
class Architecture:
    """An entry of the registry: a family, and the network that a config of it describes.

    `build(cfg)` gives a `Classifier` with freshly initialised weights, nodes off. `blocks`: the parts that repeat, in
    the order of the forward pass; they are recomputed to save memory, sharded, and counted by layer decay. `stages`:
    the parts that can be frozen. `pairs`: a norm and the linears that alone read its output, so that a factor
    can move from one to the others; stars stand for the same words in all. `exchanges`: other such places;
    `streams(model)`: such places in residual streams, which depend on the depth. `padded`: parts that see zeros beside
    tokens where a map has no whole windows, so that no offset may move into them. `no_decay`: parts of the names of
    parameters without weight decay, beside norms and biases. `rewrites`: the module that rewrites the network for ONNX,
    or the name of one of the exporter's own; None: the generic export. `backbone` names a function "module:function"
    from a config to the model that gives maps; None: there is none. With `pads` it makes the classifiers and embeddings
    of pictures that are not square, too; else `build` does. `embedding` names one to the model whose output is
    the head's input; None: the classifier without its `head`. `one_window`: a config -> the channels of a head and the
    tokens of a picture, where every attention is over all tokens; None for another network.
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
    pads: bool = False
    one_window: Callable[[CfgNode], tuple[int, int] | None] | None = None

    @property
    def name(self) -> str:
        """MODEL.TYPE in its configs."""
        return self.family.name
