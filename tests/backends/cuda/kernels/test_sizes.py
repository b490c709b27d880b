"""Every launch of deployed networks, fused and single, against its reference.

Large operands take other tiles, warps and stages than small ones: also the widest network, pictures of 384, and windows
of 12, 16 and 24. Only a GPU runs these tests, in a separate step of scripts/gpu_check.sh; the interpreter runs the same
check on small networks.
"""

from dataclasses import replace

import pytest
import torch
from fusions import with_fusions
from kernel_runs import BYTES, LARGEST_WEIGHT, SQUARES, Draw, assert_near, attention_moves, both, poisoned

from swin_quant.backends.cuda.fusions import FUSIONS
from swin_quant.backends.cuda.launches import build_program
from swin_quant.backends.cuda.program import ScalarRef, TensorRef, format_shape, make_kernel
from swin_quant.backends.cuda.spec import LARGEST_HEAD_DIM, make_spec_from_config
from tests.backends.conftest import MICRO, MORE
from tests.backends.cuda.conftest import spec_of_model

PRECISIONS = ("int8", "float")
FUSED = {fusion.op for fusion in FUSIONS}
OUTPUTS = ("out", "out_quantized")
LEVELS = 30.0
NUMBERS = {"eps": 1e-5, "scale": 1.0, "levels": LEVELS, "input_levels": LEVELS, "hidden_levels": LEVELS}
# A fused kernel rounds intermediate values on the chip: several operands of a row may fall on the other side of a tie
# than the reference's.
MOVED = 8
MOVED_LEVELS = 100  # times NEAR: how far they move an int8 result


def distinct(spec, batch):
    return list({format_shape(one): one for one in with_fusions(build_program(spec, batch).launches)}.values())


def operands(launch, draw):
    """Arguments whose sums and norms are about one and levels some tens, so that nothing saturates."""
    words = {ref: word for word, ref in reversed(launch.operands.items()) if word not in OUTPUTS}
    made = vars(make_kernel(launch, lambda ref: tensor(draw, launch, words.get(ref, "out"), ref))).copy()
    kind = next((ref.dtype for word, ref in launch.operands.items() if word in ("qkv", "a")), None)
    for word, value in launch.arguments.items():
        if isinstance(value, ScalarRef):
            made[word] = number(word, kind, launch.arguments)
    return made


def tensor(draw, launch, word, ref):
    width = ref.shape[-1]
    if ref.times:
        return tensor(draw, launch, word, replace(ref, times=None)) * LEVELS
    if word in OUTPUTS:
        return poisoned(ref.dtype, *ref.shape)
    if word.startswith("scale"):
        w = launch.arguments[word.replace("scale", "w")]
        return draw.positive(*ref.shape) / (w.shape[1] ** 0.5 * SQUARES.get(w.dtype, 1))
    if word in ("w", "w1", "weight") and ref.dtype not in BYTES and len(ref.shape) > 1:
        return draw.real(*ref.shape, dtype=ref.dtype, scale=width**-0.5)
    if word == "levels":
        return draw.positive(*ref.shape, low=20, high=60)
    if word == "lengths":
        heads = launch.arguments["epilogue"].head_dim
        return draw.positive(width // heads).repeat_interleave(heads)
    return draw.operand(ref.dtype, *ref.shape)


def number(word, kind, arguments):
    if word == "logits_scale":
        heads = arguments["qkv"].shape[1] // (3 * arguments["heads"])
        return 1 / heads**0.5 / SQUARES.get(kind, 1)
    largest = 127.0 if kind == torch.int8 else 448.0
    if word == "softmax_levels":
        return largest
    if word == "context_scale":
        return 1 / largest if arguments["softmax_levels"] else 1.0
    return NUMBERS[word]


def check(run, launch, seed=1):
    arguments = operands(launch, Draw(seed))
    outputs = [word for word in OUTPUTS if isinstance(launch.arguments.get(word), TensorRef)]
    rounded = [word for word in outputs if arguments[word].dtype in BYTES]
    for got, exact in both(run, launch.op, outputs, arguments, rounded):
        assert exact.float().std() > 0 and got.shape == exact.shape
        if launch.op == "attention":
            moves = attention_moves(arguments, tiled=arguments["windows"].tokens > 64)
            assert_near(run, got, exact, moves=moves)
        elif launch.op not in FUSED:
            assert_near(run, got, exact)
        elif got.dtype in BYTES:
            assert_near(run, got, exact, steps=MOVED_LEVELS)
        else:
            step = MOVED * LARGEST_WEIGHT * arguments["scale"].max() if arguments["w"].dtype in BYTES else 1e-2
            norm = arguments.get("norm_weight") if launch.arguments.get("post", launch.op == "mlp") else None
            step = step if norm is None else step * norm.abs().max()
            assert (got.float() - exact.float()).abs().max() <= 4e-3 * exact.float().abs().max() + step


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_launches_of_small_networks(run, tiny_config, kind, precision):
    for launch in distinct(make_spec_from_config(tiny_config(kind, **MICRO, **MORE[kind]), precision), 2):
        check(run, launch)


@pytest.mark.parametrize("run", ["interpreter"], indirect=True)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("channels", [64, LARGEST_HEAD_DIM])
def test_launches_of_small_networks_with_wide_heads(run, tiny_config, kind, precision, channels):
    config = tiny_config(kind, **MICRO, **MORE[kind], EMBED_DIM=channels)
    for launch in distinct(make_spec_from_config(config, precision), 2):
        check(run, launch)


ATTENTION = {"attention", "attention_norm"}
OF_MAPS = {"patch_embed", "merge_quantize", "pool"}  # kernels whose addresses depend on the picture's size
PLAIN = {"gemm", "norm_quantize"}
LARGE, AT_384 = "swin_large_patch4_window7_224_22kto1k_finetune", "swin_base_patch4_window12_384_finetune"
WINDOW_16, WINDOW_24 = "swinv2_tiny_patch4_window16_256", "swinv2_base_patch4_window12to24_192to384_22kto1k_ft"
DEPLOYED = ("swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224", "swinv2_tiny_patch4_window8_256")
# Model, batch, precision, kernels (None: each). Batches of wide networks are small: references of attention keep all
# logits.
WIDE = (
    (LARGE, 2, "int8", FUSED | ATTENTION | OF_MAPS | PLAIN),
    (LARGE, 2, "float", FUSED),
    (AT_384, 1, "int8", ATTENTION | OF_MAPS),
    *((model, 1, precision, ATTENTION) for model in (WINDOW_16, WINDOW_24) for precision in PRECISIONS),
)
CASES = (*((model, 8, precision, None) for precision in PRECISIONS for model in DEPLOYED), *WIDE)


def launches_of(cases):
    for model, batch, precision, ops in cases:
        for launch in distinct(spec_of_model(model, precision), batch):
            if ops is None or launch.op in ops:
                yield pytest.param(launch, id=f"{precision} {model}: {launch.name}, {launch.op}")


@pytest.mark.gpu
@pytest.mark.parametrize("run", ["gpu"], indirect=True)
@pytest.mark.parametrize("launch", [*launches_of(CASES)])
def test_launches_of_networks(run, launch):
    check(run, launch)
