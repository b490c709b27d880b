"""Policies: the resulting spec, or one line that says what no kernel does."""

import pytest
import torch

from swin_quant.backends.cuda.launches import check_batch
from swin_quant.backends.cuda.network import pack
from swin_quant.backends.cuda.spec import NetworkSpec, spec_for
from swin_quant.base.errors import UsageError
from swin_quant.quant.fake_quant import fake_quant
from swin_quant.quant.policy import Rule, apply_policy, load_policy
from tests.backends.conftest import MICRO
from tests.backends.cuda.conftest import spec_of_model


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_policies_of_the_engine(calibrated, kind):
    spec = spec_for(calibrated(kind, "cuda"))
    assert spec.arithmetic == "cuda" and spec.version == 1 + (kind == "swinv2")
    assert spec.quantized == {name for name in spec.products() if not name.endswith("a v")}
    assert spec == NetworkSpec(spec.geometry, spec.version, quantized=spec.quantized)
    assert spec_for(calibrated(kind, "ft-mode1")).arithmetic == "ft-mode1"
    assert spec_for(calibrated(kind, "cpu").requires_grad_(False), "float").quantized == frozenset()


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_float8(calibrated, kind):
    spec = spec_for(calibrated(kind, "cuda-fp8"))
    assert spec.quantized == {name for name in spec.products() if not name.endswith("a v")} and spec.format == "fp8"
    probabilities = load_policy("cuda-fp8").on("role:softmax_output").format("role:softmax_output", "fp8")
    assert spec_for(calibrated(kind, probabilities)).quantized == set(spec.products())


NARROW = Rule(nodes=("role:activation",), narrow_range=True)
BAD = {
    "two formats": (load_policy("cuda").format("*.mlp.*", "fp8"), "in one format, int8 or fp8: the policy has .*mlp"),
    "zero points": ("cpu", "no zero points"),
    "4 bits": (load_policy("cuda").bits("role:gemm_weight", 4), "4 bits; give 8"),
    "residual": (load_policy("cuda").on("role:residual"), "cannot quantize layers.0.blocks.0.add1"),
    "outputs": (load_policy("cuda").on("*.mlp.fc2._aftergemm_quantizer"), "cannot quantize .*fc2._aftergemm"),
    "one operand": (load_policy("cuda").off("*.fc1._weight_quantizer"), "quantize .*fc1._weight_quantizer as well as"),
    "k alone": (load_policy("cuda").off("*.matmul_q_input_quantizer"), "quantize .*matmul_q.* as well as .*matmul_k"),
    "without v": (load_policy("cuda").off("*.matmul_v_input_quantizer"), "q, k and v in one type"),
    "narrow activations": (load_policy("cuda").and_then(NARROW), "at -128: .*_input_quantizer and .* more have a"),
    "nothing": ("float", "needs a policy that quantizes something"),
}


@pytest.mark.parametrize("case", BAD)
def test_policies_that_it_does_not_run(calibrated, case):
    policy, message = BAD[case]
    with pytest.raises(UsageError, match=message) as error:
        spec_for(calibrated("swin", policy))
    assert "\n" not in str(error.value)


def test_fastertransformer_has_no_factors_in_front_of_the_last_norm(calibrated):
    model = calibrated("swinv2", "ft-mode1")
    model.norm.factors.give(torch.ones(model.norm.factors.channels))
    with pytest.raises(UsageError, match="`equalize` put factors .*where ft-mode1 has none: calibrate the float"):
        spec_for(model)
    apply_policy(model, load_policy("cuda"))
    assert spec_for(model).exit_factors


@pytest.mark.parametrize("keys", [{"OUTPUT_KIND": "embedding"}, {"OUTPUT_KIND": "features"}, None])
def test_models_that_are_no_classifiers_of_swin(tiny_model, keys):
    model = tiny_model("swin", **MICRO, **keys) if keys else torch.nn.Conv2d(3, 8, 1)
    with pytest.raises(UsageError, match="^the CUDA engine runs Swin V1 and V2 as classifiers only: export to another"):
        spec_for(model, "float")


def test_norms_with_another_epsilon(calibrated):
    model = calibrated()
    model.layers[1].blocks[0].norm2.eps = 1e-6
    message = "^the CUDA engine's norms have an epsilon of 1e-05: layers.1.blocks.0.norm2 have not$"
    for precision in ("int8", "float"):
        with pytest.raises(UsageError, match=message):
            spec_for(model, precision)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"EMBED_DIM": 16}, "EMBED_DIM 16: int8 products need a multiple of 32"),
        ({"MLP_RATIO": 1.5}, "MLP_RATIO 1.5: int8 products need hidden channels in multiples of 32"),
        ({"EMBED_DIM": 160}, "heads of 160 channels: at most 128"),
        ({"WINDOW_SIZE": 33}, "WINDOW_SIZE 33: at most 32"),
    ],
)
def test_geometries_that_it_does_not_run(calibrated, keys, message):
    with pytest.raises(UsageError, match=f"^the CUDA engine cannot run this model: {message}"):
        spec_for(calibrated("swin", **keys))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("swin_tiny_patch4_window7_224", 56 * 56 * 4 * 96),  # after fc1 of the first stage
        ("swin_large_patch4_window12_384_22kto1k_finetune", 96 * 96 * 4 * 192),
    ],
)
def test_no_tensor_is_larger_than_kernels_can_address(name, values):
    spec = spec_of_model(name)
    most = (2**31 - 1) // values
    check_batch(spec, most)
    assert most >= 256  # an export's default
    with pytest.raises(UsageError, match=f"^batch {most + 1}: .* at most {most} here"):
        check_batch(spec, most + 1)


def ties(shape: torch.Size, is_float8: bool) -> torch.Tensor:
    """Values halfway between two levels: of int8, and of float8, which has eight in an octave."""
    draws = torch.Generator().manual_seed(0)
    if not is_float8:
        return torch.randint(-127, 127, shape, generator=draws) + 0.5
    steps, octave = (torch.randint(*ends, shape, generator=draws) for ends in ((8, 16), (-4, 5)))
    return (steps + 0.5) * 2.0**octave


@pytest.mark.parametrize("policy", ["cuda", "cuda-fp8"])
@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_weights_are_to_the_bit_those_of_fake_quant(calibrated, kind, policy):
    """On ties too, where a quotient in float64 may differ from fake-quant's in float32."""
    model = calibrated(kind, policy)
    linears = {name: one for name, one in model.named_modules() if name.endswith((".fc1", ".fc2", ".reduction"))}
    largest = 127 if policy == "cuda" else 448
    with torch.no_grad():
        for layer in linears.values():
            amax = layer._weight_quantizer.range_for(layer.weight)
            layer.weight.copy_(ties(layer.weight.shape, largest == 448) * (amax / largest))
            layer.weight[:, :1] = amax  # ranges per row stay
    packed = pack(model, spec_for(model))
    for name, layer in linears.items():
        node, levels = layer._weight_quantizer, packed.tensors[f"{name}.weight"].float()
        simulated = fake_quant(layer.weight, node.range_for(layer.weight), *node.grid)
        step = node.range_for(layer.weight) / largest
        assert torch.equal(levels * step, simulated), name
        scale = step.double().flatten() * layer._input_quantizer.range.double() / largest
        assert torch.equal(packed.tensors[f"{name}.scale"], scale.float().expand(len(levels))), name
