import os
import signal
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from nightly import share
from PIL import Image

from swin_quant.base.distributed import World
from swin_quant.base.errors import SwinQuantError
from swin_quant.data.pictures import Pictures
from swin_quant.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from swin_quant.quant.calibration import Method, calibrate
from swin_quant.quant.policy import enabled_nodes, quantize
from swin_quant.train import loop
from swin_quant.train.amax import RangeKeeper
from swin_quant.train.batches import TrainingBatches, ValidationBatches
from swin_quant.train.loop import Job, fit
from swin_quant.train.outdir import Table, open_folder, read_table
from swin_quant.train.parallel import Precision
from swin_quant.train.recipe import Augmentation, Distillation, Optimizer, Ranges, Recipe, Schedule
from swin_quant.train.snapshot import Snapshots, check_snapshot
from tests.helpers.refusals import refused
from tests.helpers.settings import change

PREPROCESS = Preprocess(16, False, "bicubic", IMAGENET_MEAN, IMAGENET_STD)
PADDED = Augmentation(crop="padded", padding=1)
RECIPE = Recipe(
    epochs=3, batch_size=4, optimizer=Optimizer(lr=3e-3), schedule=Schedule(warmup_epochs=1), augment=PADDED
)


class Stripes(Pictures):
    """Pictures of 16 x 16 with horizontal (0) or vertical (1) stripes, and noise."""

    def __init__(self, count, seed):
        self.names = [f"{index}.png" for index in range(count)]
        self.labels = [index % 2 for index in range(count)]
        self.class_names = ["lying", "standing"]
        self.seed = seed

    def open(self, index):
        noise = np.random.default_rng((self.seed, index)).integers(0, 100, (16, 16, 3))
        stripes = np.arange(16)[:, None, None] % 4 // 2 * 155
        pixels = (noise + (stripes.swapaxes(0, 1) if self.labels[index] else stripes)).astype(np.uint8)
        return Image.fromarray(pixels)


@pytest.fixture
def job(tiny_model, tmp_path):
    """make(recipe, kind, folder, **fields of Job) -> a new job of three steps an epoch."""

    def make(recipe=RECIPE, kind="swin", folder=None, **fields):
        keys = {"IMG_SIZE": 16, "NUM_CLASSES": 2, "EMBED_DIM": 16, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
        model = tiny_model(kind, **keys, DROP_PATH_RATE=0.2)
        world = World()
        batches = TrainingBatches(Stripes(14, 1), recipe, PREPROCESS, 2, 5, world, 0)
        validation = ValidationBatches(Stripes(20, 2), PREPROCESS, 8, world, 0)
        return Job(model, recipe, batches, validation, 5, world, folder=folder and tmp_path / folder, **fields)

    return make


def weights(job):
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def newest(job, *check):
    return Snapshots(job.folder / "snapshots").newest(*check)


def untimed(job, table):
    """The rows of a table without times."""
    times = ("images_per_second", "seconds")
    return [{k: v for k, v in row.items() if k not in times} for row in read_table(job.folder / table)]


class Stop(Exception):
    """An interrupt from outside."""


def stopping_at(total, how=None):
    """A function that raises Stop, or sends a signal, when it is called for the `total`th time."""
    calls = iter(range(1, 1000))

    def after_step():
        if next(calls) == total:
            if how is None:
                raise Stop
            os.kill(os.getpid(), how)

    return after_step


def test_it_learns_and_a_student_from_its_teacher_alone(job, tiny_model):
    made = job(replace(RECIPE, epochs=12))
    position, _ = fit(made)
    assert not made.model.training and position.best_acc1 >= 95
    assert position.epochs[-1]["train_loss"] < position.epochs[0]["train_loss"] / 2
    assert (position.epoch, position.total) == (12, 36)
    distill = Distillation(weight=5.0, temperature=2.0, labels=0.0)
    made = job(replace(RECIPE, epochs=10, distill=distill, augment=Augmentation(crop="none", flip=0.0)))
    keys = {"IMG_SIZE": 16, "NUM_CLASSES": 2, "EMBED_DIM": 32, "DEPTHS": [1, 1], "NUM_HEADS": [1, 2]}
    made.teacher = tiny_model(seed=3, **keys).eval().requires_grad_(False)
    first, *_, last = fit(made)[0].epochs
    assert last["train_loss"] < 0.6 * first["train_loss"]


MIXED = {"optimizer": Optimizer("sgd", lr=0.02), "augment": Augmentation(crop="padded", cutmix=1.0, erase=0.5)}
RECIPES = {
    "adamw": RECIPE,
    "sgd, ema, cutmix": replace(RECIPE, ema=0.9, **MIXED),
    "autocast, accumulation": replace(RECIPE, precision="O1", batch_size=2, accumulation_steps=2),
    "master weights": replace(RECIPE, precision="O2"),
    "half, average": replace(RECIPE, precision="O3", ema=0.9),
}


@pytest.mark.parametrize(
    ("name", "stop"),
    share(
        [*((name, 4) for name in RECIPES), ("adamw", 1), ("adamw", 6), ("sgd, ema, cutmix", 6), ("master weights", 1)],
        3,
    ),
)
def test_a_run_that_goes_on_ends_with_the_same_bits(job, name, stop):
    recipe = RECIPES[name]
    fit(whole := job(recipe, folder="whole"))
    stopped = job(replace(recipe, save_minutes=1e-9), folder="stopped", after_step=stopping_at(stop + 1))
    with pytest.raises(Stop):
        fit(stopped)
    snapshot = newest(stopped)
    assert snapshot["position"]["total"] == stop
    torch.manual_seed(99)
    fit(resumed := job(recipe, folder="stopped", snapshot=snapshot))
    assert same(weights(whole), weights(resumed))
    steps = untimed(whole, "steps.csv")
    assert untimed(resumed, "steps.csv") == steps and len(steps) == 9
    assert len([*read_table(resumed.folder / "epochs.csv")]) == 3


BROKEN = {
    **{f"no {name}": (name, None) for name in ("model", "optimizer", "schedule", "scaler", "random", "settings")},
    "no position": ("position", None),
    "settings that are no mapping": ("settings", ["seed", 5]),
    "settings of tensors": ("settings", {"seed": torch.ones(2)}),
    "a position of text": ("position", {"epoch": "one"}),
    "settings with a number for a key": ("settings", {"epochs": 1, 7: 1}),
    "weights of another model": ("model", {"w": torch.ones(3)}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_snapshot_without_one_of_its_parts_is_passed_over(job, caplog, name):
    fit(made := job(folder="made", settings={"seed": 5}))
    snapshots = Snapshots(made.folder / "snapshots")
    check = partial(check_snapshot, model=made.model)
    whole, (part, value) = snapshots.newest(check), BROKEN[name]
    snapshots.save(10, {key: content for key, content in (whole | {part: value}).items() if content is not None})
    found = snapshots.newest(check)
    assert found["position"] == whole["position"]
    assert "step_000000010.pt is damaged and is passed over" in caplog.text


def test_a_snapshot_whose_parts_do_not_fit_is_one_line(job):
    fit(made := job(folder="made"))
    whole = newest(made)
    for part in ("optimizer", "scaler", "random", "schedule"):
        with pytest.raises(SwinQuantError, match="the snapshot cannot be resumed .*overwrite starts anew"):
            fit(job(replace(RECIPE, precision="O1", half="float16"), folder="made", snapshot=whole | {part: {"x": 1}}))
    numbers = whole["random"] | {"numpy": ("MT19937", [-1] * 624, 0, 0, 0.0)}
    with pytest.raises(SwinQuantError, match="cannot be resumed .*out of bounds"):
        fit(job(folder="made", snapshot=whole | {"random": numbers}))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_in_hand_and_ends_the_run(job, number):
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped := job(folder="stopped", after_step=stopping_at(5, number)))
    assert signal.getsignal(number) is handler and 5 <= newest(stopped)["position"]["total"] <= 6


@pytest.mark.parametrize(
    ("mode", "kind", "place"),
    share(
        [
            ("learned with zero points", "swin", "first"),
            ("reestimated", "swinv2", "last"),
            ("frozen", "swin", "last"),
            ("learned", "swinv2", "step"),
            ("reestimated", "swin", "step"),
        ],
        5,
    ),
)
def test_qat_that_was_stopped_ends_with_the_same_bits(job, use_policy, mode, kind, place):
    """Between two steps, or during validation, of three batches, of the first or last epoch; after the very last batch
    the exit code used to be 0."""
    recipe = replace(RECIPE, ema=0.9)
    whole, keeper = qat(job, mode, recipe, "whole", kind, use_policy=use_policy)
    fit(whole)
    keeper.settle(keeper.model)
    stopped, _ = qat(job, mode, recipe, "stopped", kind, use_policy=use_policy)
    if place == "step":
        inner, stop = stopped.after_step, stopping_at(5, signal.SIGTERM)
        stopped.after_step = lambda: (inner(), stop())
    else:
        stopped.validation = Signalling(stopped.validation, at=2 if place == "first" else 8)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped)
    snapshot = newest(stopped)
    assert snapshot["position"]["total"] in {"first": (3,), "last": (9,), "step": (5, 6)}[place]
    resumed, keeper = qat(job, mode, recipe, "stopped", kind, snapshot, use_policy)
    fit(resumed)
    keeper.settle(keeper.model)
    assert same(weights(whole), weights(resumed))
    epochs = untimed(whole, "epochs.csv")
    assert untimed(resumed, "epochs.csv") == epochs and len(epochs) == 3


@pytest.mark.parametrize("place", [(Table, "add"), (Snapshots, "save_best")])
def test_a_run_that_is_killed_with_results_of_its_first_epoch_goes_on(job, monkeypatch, place):
    """Between its row or best weights and its snapshot: `--continue` used to refuse results without a snapshot."""
    fit(whole := job(folder="whole"))
    written = getattr(*place)

    def killed(self, *arguments):
        written(self, *arguments)
        if not isinstance(self, Table) or self.path.name == "epochs.csv":
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(*place, killed)
        fit(stopped := job(folder="stopped", settings={"seed": 5}))
    snapshot = open_folder(stopped.folder, {"seed": 5}, True, False, 2, partial(check_snapshot, model=stopped.model))
    assert snapshot["position"]["total"] == 3
    fit(resumed := job(folder="stopped", snapshot=snapshot))
    assert same(weights(whole), weights(resumed))
    assert [row["epoch"] for row in read_table(resumed.folder / "epochs.csv")] == ["1", "2", "3"]


class Signalling:
    """Validation batches during which SIGTERM comes, at the batch `at` of all."""

    def __init__(self, batches, at):
        self.batches, self.parts, self.look = batches, batches.parts, stopping_at(at, signal.SIGTERM)

    def __iter__(self):
        for batch in self.batches:
            self.look()
            yield batch


def test_a_signal_during_the_last_save_is_not_swallowed(job, monkeypatch):
    save = Snapshots.save

    def signalled(self, step, content):
        save(self, step, content)
        if step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Snapshots, "save", signalled)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped := job(folder="out"))
    assert newest(stopped)["position"]["epoch"] == 3


def test_a_run_depends_on_its_seed_alone_and_checkpointing_changes_no_bit(job):
    runs = [job() for _ in range(4)]
    runs[2].seed = runs[2].batches.seed = 6
    for stage in runs[3].model.layers:
        stage.checkpointing = True
    for run in runs:
        fit(run)
    one, again, other, checkpointed = map(weights, runs)
    assert same(one, again) and same(one, checkpointed) and not same(one, other)


@pytest.fixture
def scored(monkeypatch):
    """scored(accuracies) -> the weights at each validation, whose results are these."""

    def use(accuracies):
        states, scores = [], iter(accuracies)

        def validate(run):
            states.append(weights(run.job))
            return {"val_loss": 1.0, "acc1": next(scores), "acc5": 50.0}

        monkeypatch.setattr(loop._Run, "_validate", validate)
        return states

    return use


def test_the_best_epoch_is_the_result_and_the_run_stops_when_validation_gets_no_better(job, scored):
    states = scored([10.0, 30.0, 20.0])
    position, _ = fit(made := job(folder="out"))
    assert position.best_epoch == 2 and same(weights(made), states[1]) and not same(states[1], states[2])
    states = scored([10.0, 30.0, 20.0])
    fit(made := job(replace(RECIPE, select="last"), folder="last"))
    assert same(weights(made), states[2])
    scored([10.0, 30.0, 20.0, 29.0, 31.0, 32.0])
    position, _ = fit(job(replace(RECIPE, epochs=6, patience=2)))
    assert position.epoch == 4 and position.best_epoch == 2


def test_a_loss_that_is_no_number_ends_the_run_by_name_and_keeps_what_was_saved(job):
    def poison():
        if (made.folder / "snapshots").exists():  # from the second epoch on
            with torch.no_grad():
                made.model.head.bias.fill_(torch.nan)

    made = job(folder="out", after_step=poison)
    refused(lambda: fit(made), "the loss is nan at step 2 of epoch 2 (step 5 in all)")
    snapshot = newest(made)
    assert snapshot["position"]["total"] == 3 and snapshot["model"]["head.bias"].isfinite().all()


def test_gradients_that_no_smaller_scale_makes_finite_end_the_run(job, monkeypatch):
    """float16 on a GPU: the scaler skips overflowing steps, and without this would silently skip every step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(Precision, "scaler", lambda self: scaler)
    made = job(folder="out")
    made.model.head.bias.register_hook(lambda gradient: gradient * torch.nan)
    refused(lambda: fit(made), "the gradient is nan at step 1 of epoch 2 (step 4 in all)")
    assert scaler.get_scale() == 0.5


def qat(job, mode, recipe=RECIPE, folder=None, kind="swin", snapshot=None, use_policy=None, **keys):
    mode, _, zero_points = mode.partition(" with ")
    recipe = replace(recipe, amax=Ranges(mode=mode, batches=2, **keys))
    made = job(recipe, kind, folder, snapshot=snapshot)
    calibrate(made.model, [batch for batch in made.batches.sample(2)], Method("max"))
    use_policy(made.model, "ft-mode1")
    for name, node in enabled_nodes(made.model).items():
        change(node, symmetric=not (zero_points and name.endswith("mlp.fc2._input_quantizer")))
    quantize(made.model)
    keeper = RangeKeeper(made.model, recipe.amax, recipe.epochs, lambda: made.batches.sample(2))
    made.after_step, made.after_epoch = keeper.after_step, keeper.after_epoch
    return made, keeper
