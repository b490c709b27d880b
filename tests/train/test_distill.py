import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import save_float
from swin_quant.models import build_model
from swin_quant.train.distill import check_teacher, kl_divergence, load_teacher
from swin_quant.train.recipe import Distillation


def test_kl_is_the_mean_over_pictures_times_t_squared():
    student, teacher, t = torch.randn(5, 7), torch.randn(5, 7), 2.5
    p, q = (teacher / t).softmax(1), (student / t).softmax(1)
    assert torch.isclose(kl_divergence(student, teacher, t), (p * (p / q).log()).sum(1).mean() * t**2)
    assert kl_divergence(teacher, teacher, t).abs() < 1e-6
    twice = kl_divergence(student.repeat(2, 1), teacher.repeat(2, 1), t)
    assert torch.isclose(twice, kl_divergence(student, teacher, t))


@pytest.mark.parametrize("classes", [10, 1000])
def test_ft_is_fastertransformers_loss_to_the_letter(classes):
    student, teacher = torch.randn(6, classes), torch.randn(6, classes)
    theirs = nn.KLDivLoss()(F.log_softmax(student / 3.0, dim=-1), F.softmax(teacher / 3.0, dim=-1))
    recipe = Distillation(weight=10000.0, compat="ft")
    assert torch.isclose(kl_divergence(student, teacher, recipe.temperature, recipe.compat), theirs)


CPU = torch.device("cpu")


def test_a_teacher_comes_as_saved_where_the_recipe_distils_and_leaves_the_random_state_alone(
    tiny_config, tiny_model, tmp_path
):
    file, student, cfg = tmp_path / "teacher.pth", tiny_model(), tiny_config()
    save_float(tiny_model(seed=4), file)
    before = torch.get_rng_state()
    teacher, source = load_teacher(str(file), cfg, Distillation(weight=1.0), student, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(teacher.head.weight, tiny_model(seed=4).head.weight) and source["file"] == "teacher.pth"
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())
    assert load_teacher(None, cfg, Distillation(), student, CPU) == (None, None)
    for path, recipe, says in (
        ("teacher.pth", Distillation(), "teacher needs a recipe that distils"),
        (None, Distillation(weight=1.0), "give a teacher FILE"),
        (str(tmp_path / "none.pth"), Distillation(weight=1.0), "no such checkpoint"),
    ):
        with pytest.raises(SwinQuantError, match=says):
            load_teacher(path, cfg, recipe, student, CPU)


def test_a_teacher_must_speak_of_the_same(tiny_config):
    student = build_model(tiny_config())
    wider = build_model(tiny_config(EMBED_DIM=64))
    check_teacher(student, wider)
    with pytest.raises(UsageError, match="has 7 classes, the student 10"):
        check_teacher(student, build_model(tiny_config(NUM_CLASSES=7)))
    coarse = build_model(tiny_config(PATCH_SIZE=4, DEPTHS=[1, 1], NUM_HEADS=[1, 2]))
    check_teacher(student, coarse)
