"""Export to the CUDA engine: one file packed for its kernels, and the run card beside it."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from swin_quant.backends.artifact import Artifact, finish_artifact
from swin_quant.backends.cuda.file import write_network
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.spec import REDUCTION, NetworkSpec
from swin_quant.backends.cuda.spec_from_policy import check_batch, list_operand_nodes, list_value_nodes, spec_for
from swin_quant.base.errors import SwinQuantError, UsageError, listed
from swin_quant.base.files import ensure_writable_dir
from swin_quant.base.progress import log
from swin_quant.cards.card import RunCard
from swin_quant.cards.paths import card_path
from swin_quant.data.preprocess import Preprocess
from swin_quant.models.layers import Swin
from swin_quant.score.engine import HALF_TYPES

BACKEND = "cuda"
LARGEST_BATCH = 256
MOST_PICTURES = 4096
_STREAMS = ("layernorm_input1", "layernorm_input2", "add1_residual", "add1_local", "add2_residual", "add2_local")


@dataclass(frozen=True)
class CudaOptions:
    """`precision`: int8 (the policy's format, which may be float8) or float. `float_type`: float16 or bfloat16, for the
    residual stream and, with precision float, all products; None: float16, and bfloat16 where calibration saw values
    beyond float16. `batch`: the most pictures a call takes. `uint8_input`: pictures are decoded pixels, uint8
    [batch, S, S, 3], which the patch embedding normalises."""

    precision: str = "int8"
    float_type: str | None = None
    batch: int = LARGEST_BATCH
    uint8_input: bool = False

    def __post_init__(self) -> None:
        if self.float_type not in (None, *HALF_TYPES):
            raise UsageError(f"‹float_type› {self.float_type}: the CUDA engine has {' and '.join(HALF_TYPES)}")
        if not 1 <= self.batch <= MOST_PICTURES:
            raise UsageError(f"‹batch› {self.batch}: must be at least 1, at most {MOST_PICTURES}")


def export(
    model: nn.Module,
    card: RunCard,
    folder: Path,
    options: CudaOptions = CudaOptions(),
) -> Artifact:
    """Write a calibrated `model`, with its policy applied, into `folder`.

    UsageError for a policy or geometry that the engine does not run; SwinQuantError for missing ranges, and for values
    that overflow float16.
    """
    spec = spec_for(model, options.precision, options.float_type or "float16", options.uint8_input)
    check_batch(spec, options.batch)
    assert isinstance(model, Swin)
    preprocess = Preprocess.from_dict(card.preprocess) if spec.pixels else None
    if preprocess and (not preprocess.is_square or model.in_chans != len(preprocess.mean)):
        raise UsageError("‹uint8_input›: is for RGB pictures of one size, which this model does not take")
    if spec.float_type == "float16":
        spec = replace(spec, float_type=_choose_float_type(spec, card, options.float_type))
    options = replace(options, float_type=spec.float_type)
    network = pack(model, spec, preprocess)
    precision = spec.format if options.precision == "int8" else spec.float_type
    words = [card.name, precision, *(["uint8"] if spec.pixels else []), BACKEND]
    file = ensure_writable_dir(folder) / f"{'_'.join(words)}.safetensors"
    card_path(file).unlink(missing_ok=True)  # without a card, an unfinished file is not taken for an export
    write_network(network, file)
    made = asdict(options) | {"arithmetic": spec.arithmetic, "gelu": spec.gelu()}
    card = card if options.precision == "int8" else replace(card, policy=None)
    return finish_artifact(file, card, BACKEND, precision, made)


def _choose_float_type(spec: NetworkSpec, card: RunCard, given: str | None) -> str:
    """float16, or bfloat16, with a warning, where calibration saw values beyond float16 that the engine keeps in it:
    SwinQuantError if the policy or the `given` type forbids that."""
    halves = {
        node
        for product in spec.products()
        if product not in spec.quantized  # int8 saturates instead of overflowing
        for node in list_operand_nodes(product, spec.version)
    }
    if not spec.is_ft:
        halves |= {f"{layer}._aftergemm_quantizer" for layer in spec.linears() if layer.endswith(REDUCTION)}
    halves -= list_value_nodes(spec.quantized)
    seen = card.calibration["beyond_half"] if card.calibration else []
    beyond = [node for node in seen if node in halves or node.rpartition(".")[2].startswith(_STREAMS)]
    if not beyond:
        return "float16"
    said = f"calibration saw values beyond float16 (65504) in {listed(beyond, 4)}"
    if spec.is_ft:
        raise SwinQuantError(f"{said}, and {spec.arithmetic} is FasterTransformer's, in float16: give ‹policy› cuda")
    if given:
        raise SwinQuantError(f"{said}, which the CUDA engine keeps in it: give ‹float_type› bfloat16, or none")
    log.warning("%s: the residual stream is bfloat16", said)
    return "bfloat16"
