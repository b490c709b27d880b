"""Training steps: the levels of precision, compiled ones, and the cache of compiled graphs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.train.parallel import Precision, check_compiler, parallel, tell_cpus_apart
from swin_quant.train.recipe import Memory, Recipe

CPU = torch.device("cpu")
RECIPE = Recipe(compile=True)


def precision(level, half="bfloat16"):
    return Precision.choose(level, half, CPU)


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_all_levels_compute_about_the_same_and_update_float32_weights(tiny_model, kind, level):
    images = torch.randn(4, 3, 32, 32)
    exact = tiny_model(kind)(images)
    model = tiny_model(kind)
    logits = precision(level).logits(precision(level).network(model), images)
    assert logits.dtype == torch.float32
    signal, noise = exact.square().sum(), (logits - exact).square().sum()
    assert noise < 0.01 * signal and (noise == 0) == (level == "O0")
    F.cross_entropy(logits, torch.tensor([0, 1, 0, 1])).backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_batch_norms_count_what_they_see_in_half_networks_too():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    network = precision("O2").network(model).train()
    precision("O2").logits(network, 5 + torch.randn(8, 3, 6, 6)).square().mean().backward()
    assert model[1].running_mean.abs().min() > 0.01 and model[1].running_var.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_o1_keeps_norms_and_the_residual_stream_in_float32(tiny_model):
    model, types = tiny_model(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: types.update({name: output.dtype}))
    precision("O1").logits(model, torch.randn(2, 3, 32, 32))
    assert types["layers.0.blocks.0.norm1"] == types["layers.0"] == torch.float32
    assert types["layers.0.blocks.0.mlp.fc1"] == torch.bfloat16


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
def test_a_half_network_has_norms_of_float32_weights(tiny_model, kind):
    model, weights = tiny_model(kind), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(lambda m, x, y, name=name: weights.update({name: (m.weight.dtype, y.dtype)}))
    network = precision("O2").network(model)
    precision("O2").logits(network, torch.randn(2, 3, 32, 32))
    assert weights and set(weights.values()) == {(torch.float32, torch.bfloat16)}
    precision("O2").finish(model)
    assert model(torch.randn(2, 3, 32, 32)).dtype == torch.float32
    assert set(weights.values()) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("kind", ["swin", "swinv2"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_checkpointing_changes_no_gradient(tiny_model, kind, level):
    images, gradients = torch.randn(2, 3, 32, 32), []
    for checkpointing in (False, True):
        model = tiny_model(kind).train()
        for stage in model.layers:
            stage.checkpointing = checkpointing
        network = precision(level).network(model)
        torch.manual_seed(0)  # drop path
        precision(level).logits(network, images).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.nightly
def test_a_compiled_step_of_qat_has_the_gradients_of_an_eager_one(tiny_model, monkeypatch):
    """Traced forward and backward, as the compiler gets it; generating code is torch's part and would take a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    keys = {"IMG_SIZE": 16, "EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
    model = tiny_model("swinv2", **keys, DROP_PATH_RATE=0.0)
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    apply_policy(model, load_policy("ft-mode2"))
    calibrate(model, [images], Method("max"))
    quantize(model)
    for node in enabled_nodes(model).values():
        node.learn_range()
    model.train()
    compiled = parallel(model, model, RECIPE, World())
    eager, traced = (gradients(model, network, images) for network in (model, compiled))
    assert eager.keys() == traced.keys() and any(name.endswith("_amax") for name in eager)
    for name, gradient in eager.items():
        torch.testing.assert_close(traced[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item() + 1e-7)


def gradients(model, network, images):
    model.zero_grad()
    network(images).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_compiled_code_is_kept_under_the_width_of_the_cpu_s_vectors(monkeypatch):
    """Otherwise a CPU with vectors of 8 values runs loops of 16 compiled on another: garbage in every second half."""
    from torch._inductor import config, cpu_vec_isa

    keys = []
    for isa in (cpu_vec_isa.VecAVX2(), cpu_vec_isa.VecAVX512(), cpu_vec_isa.invalid_vec_isa):
        monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda isa=isa: isa)
        with config.patch({"cpp.simdlen": None}):
            tell_cpus_apart()
            keys.append(config.save_config_portable())
    assert keys[0] != keys[1] != keys[2] != keys[0]


def test_without_a_compiler_it_is_refused_before_the_first_step():
    torch.compiler.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        with pytest.raises(UsageError, match="compile: torch.compile does not work here"):
            check_compiler(RECIPE, CPU)
    torch.compiler.reset()


def test_it_does_not_go_with_fsdp_and_a_recipe_without_it_needs_no_compiler(monkeypatch):
    with pytest.raises(UsageError, match="compile does not go with fsdp"):
        check_compiler(replace(RECIPE, memory=Memory(fsdp=True)), CPU)
    monkeypatch.setattr(torch, "compile", None)
    check_compiler(Recipe(), CPU)
    model = torch.nn.Linear(1, 1)
    assert parallel(model, model, Recipe(), World()) is model
