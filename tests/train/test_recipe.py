import math
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest
import yaml

from swin_quant.base.errors import UsageError
from swin_quant.base.files import shipped_files
from swin_quant.config import find_config, load_config
from swin_quant.train.recipe import Optimizer, Recipe, load_recipe, read_recipe, recipe_from_dict
from tests.helpers.refusals import refused


def test_everything_has_a_default_nothing_can_be_changed_and_plain_data_goes_round():
    recipe = recipe_from_dict({}, "here")
    assert recipe == Recipe()
    with pytest.raises(FrozenInstanceError):
        recipe.epochs = 3
    recipe = recipe_from_dict({"epochs": 3, "optimizer": {"betas": [0.8, 0.9]}, "augment": {"cutmix": 1}}, "here")
    assert recipe.optimizer.betas == (0.8, 0.9) and recipe.augment.cutmix == 1.0
    assert recipe_from_dict(yaml.safe_load(yaml.safe_dump(recipe.to_dict())), "there") == recipe


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"epoch": 3}, "unknown key 'epoch'; did you mean epochs?"),
        ({"optimizer": {"learning_rate": 1}}, "unknown key 'optimizer.learning_rate'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr is 0.0, but must be above 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr must be a number, not nan"),
        ({"optimizer": {"lr": "nan"}}, "optimizer.lr must be a number, not 'nan'"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr must be a number, not 'fast'"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name is 'lion', but must be one of adamw, sgd"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must be 2 values"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, "optimizer.betas[1] is 1.5"),
        ({"optimizer": 3}, "optimizer must be a mapping, not 3"),
        ({"epochs": 0}, "epochs is 0, but must be at least 1"),
        ({"epochs": True}, "epochs must be a whole number, not True"),
        ({"memory": {"fsdp": 1}}, "memory.fsdp must be true or false, not 1"),
        ({"augment": {"mixup": -1}}, "augment.mixup is -1.0"),
        ({"distill": {"temperature": 0}}, "distill.temperature is 0.0"),
        ([1], "the content must be a mapping"),
    ],
)
def test_what_cannot_be_meant_is_one_line(tree, says):
    assert refused(lambda: recipe_from_dict(tree, "my.yaml"), says, kind=UsageError).startswith("my.yaml: ")
    refused(lambda: Optimizer(lr=0), "lr is 0", kind=UsageError)


def test_values_by_dotted_key_as_the_command_line_gives_them():
    values = {"optimizer.lr": "2e-4", "epochs": "7", "memory.fsdp": "true", "patience": "none"}
    recipe = Recipe().having(values, "--set")
    assert (recipe.optimizer.lr, recipe.epochs, recipe.memory.fsdp, recipe.patience) == (2e-4, 7, True, None)
    assert Recipe().having({}, "--set") == Recipe()
    with pytest.raises(UsageError, match="--set: unknown key 'lr'; did you mean optimizer.lr?"):
        Recipe().having({"lr": 1}, "--set")
    for key in ("optimizer.speed", "epochs.lr", "optimiser.lr", ""):
        with pytest.raises(UsageError, match="--set: unknown key"):
            Recipe().having({key: 1}, "--set")


def test_no_number_is_without_a_range():
    def numbers(kind):
        for item in fields(kind):
            if is_dataclass(item.type):
                yield from numbers(item.type)
            elif item.type in (int, float, int | None, float | None):
                yield f"{kind.__name__}.{item.name}"

    assert list(numbers(Recipe)) == []


def test_shipped_recipes_and_files_of_the_user(tmp_path):
    for path in shipped_files("recipes"):
        recipe, raw = load_recipe(path.stem), yaml.safe_load(path.read_text())
        assert recipe.name == path.stem and recipe.description and recipe.epochs == raw["epochs"]
    (tmp_path / "mine.yaml").write_text("epochs: 3\noptimizer: {lr: 1e-4}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert (recipe.name, recipe.epochs, recipe.optimizer.lr) == ("mine", 3, 1e-4)
    (tmp_path / "bad.yaml").write_text("epochs: [3\n")
    (tmp_path / "code.yaml").write_text("epochs: !!python/object/apply:os.getcwd []\n")
    for name, says in {"bad": "not valid YAML", "code": "not valid YAML", "none": "no such recipe"}.items():
        with pytest.raises(UsageError, match=says):
            load_recipe(str(tmp_path / f"{name}.yaml"))
    refused(lambda: load_recipe("fast"), "no recipe 'fast'", kind=UsageError)


def test_the_config_is_a_recipe_too():
    cfg = load_config(find_config("swin_tiny_patch4_window7_224"))
    recipe = read_recipe(cfg)
    optimizer = recipe.optimizer
    assert (recipe.epochs, optimizer.lr, optimizer.lr_batch, recipe.augment.mixup) == (300, 5e-4, 512, 0.8)
    assert recipe.schedule.warmup_epochs == 20 and recipe.schedule.warmup_from == pytest.approx(5e-7 / 5e-4)
    for key, value in (("TRAIN.BASE_LR", 0.0), ("TRAIN.LR_SCHEDULER.NAME", "step"), ("AMP_OPT_LEVEL", "O7")):
        with pytest.raises(UsageError):
            read_recipe(load_config(find_config("swin_tiny_patch4_window7_224"), overrides={key: value}))
