"""Models over several ranks (the tests of commands have more, with several processes), and compiled steps."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from swin_quant.base.distributed import World
from swin_quant.base.errors import UsageError
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import apply_policy, enabled_nodes, load_policy, quantize
from swin_quant.train.parallel import check_compiler, parallel, tell_cpus_apart
from swin_quant.train.recipe import Memory, Recipe

CPU = torch.device("cpu")
RECIPE = Recipe(compile=True)


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
