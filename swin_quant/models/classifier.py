"""What the house asks of a network, whatever its architecture."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from swin_quant.base.errors import UsageError
from swin_quant.config.outputs import FEATURES, LOGITS
from swin_quant.quant.passes.places import Exchange

if TYPE_CHECKING:
    from swin_quant.models.registry import Architecture


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
