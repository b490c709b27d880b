import pytest
import torch

from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.checkpoint import save_float
from swin_quant.models import build_model
from swin_quant.train.distill import check_teacher, load_teacher
from swin_quant.train.recipe import Distillation

CPU = torch.device("cpu")


def test_a_teacher_comes_as_saved_and_leaves_the_random_state_alone(tiny_config, tiny_model, tmp_path):
    save_float(tiny_model(seed=4), tmp_path / "teacher.pth")
    student = tiny_model()
    before = torch.get_rng_state()
    teacher, source = load_teacher(str(tmp_path / "teacher.pth"), tiny_config(), Distillation(weight=1.0), student, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(teacher.head.weight, tiny_model(seed=4).head.weight) and source["file"] == "teacher.pth"
    assert not teacher.training and not any(parameter.requires_grad for parameter in teacher.parameters())


def test_teacher_and_distillation_go_together(tiny_config, tiny_model, tmp_path):
    assert load_teacher(None, tiny_config(), Distillation(), tiny_model(), CPU) == (None, None)
    with pytest.raises(UsageError, match="teacher needs a recipe that distils"):
        load_teacher("teacher.pth", tiny_config(), Distillation(), tiny_model(), CPU)
    with pytest.raises(UsageError, match="give a teacher FILE"):
        load_teacher(None, tiny_config(), Distillation(features=1.0), tiny_model(), CPU)
    with pytest.raises(SwinQuantError, match="no such checkpoint"):
        load_teacher(str(tmp_path / "none.pth"), tiny_config(), Distillation(weight=1.0), tiny_model(), CPU)


def test_a_teacher_must_speak_of_the_same(tiny_config):
    student = build_model(tiny_config())
    wider = build_model(tiny_config(EMBED_DIM=64))
    check_teacher(student, wider, Distillation(features=1.0))
    with pytest.raises(UsageError, match="has 7 classes, the student 10"):
        check_teacher(student, build_model(tiny_config(NUM_CLASSES=7)), Distillation())
    coarse = build_model(tiny_config(PATCH_SIZE=4, DEPTHS=[1, 1], NUM_HEADS=[1, 2]))
    check_teacher(student, coarse, Distillation())
    with pytest.raises(UsageError, match="features"):
        check_teacher(student, coarse, Distillation(features=1.0))
