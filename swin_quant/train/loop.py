"""The training loop of float training and QAT: read `fit` from top to bottom.

Other files choose the pictures of a step (`batches`), parameter groups and LR (`optim`), the teacher's part of the loss
(`distill`), half precision (`precision`) and the ranges of nodes (`amax`), and write snapshots (`snapshot`).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from swin_quant.base import progress as terminal
from swin_quant.base.distributed import World, all_sum, from_main
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import log
from swin_quant.config.outputs import LOGITS
from swin_quant.data.loader import Batch
from swin_quant.data.seeds import seed_all
from swin_quant.models.classifier import Classifier
from swin_quant.score.metrics import evaluate
from swin_quant.train.batches import MicroBatch, TrainingBatches, ValidationBatches
from swin_quant.train.distill import distillation_loss, stage_outputs
from swin_quant.train.optim import current_lr, make_optimizer, make_schedule
from swin_quant.train.parallel import average_buffers, compiled, gathering, is_sharded, parallel, whole
from swin_quant.train.precision import Precision
from swin_quant.train.recipe import Recipe
from swin_quant.train.record import Record
from swin_quant.train.snapshot import Position, Snapshots, TrainingState, make_average


@dataclass
class Job:
    """The settings of a training: model, recipe, pictures, and the output folder (None writes nothing).

    `snapshot`: the snapshot to go on from. `settings` are stored in every snapshot and compared when the run goes on.
    `after_step()` and `after_epoch(epochs done)` adapt ranges to the new weights; the figures that `after_epoch`
    returns are recorded with the epoch, and TensorBoard shows `histograms()`.
    """

    model: Classifier
    recipe: Recipe
    batches: TrainingBatches
    validation: ValidationBatches | None
    seed: int = 0
    world: World = World()
    teacher: Classifier | None = None
    folder: Path | None = None
    snapshot: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tensorboard: bool = False
    after_step: Callable[[], None] = lambda: None
    after_epoch: Callable[[int], dict[str, float]] = lambda epoch: {}
    histograms: Callable[[], dict[str, list[float]]] = lambda: {}


class StopRequested(KeyboardInterrupt):
    """A signal asked the run to end; all ranks raise this at the same step."""


class Interruption:
    """A signal handler that remembers a request to end the run."""

    def __init__(self) -> None:
        self.stops = False

    def __call__(self, number: int, frame: object) -> None:
        if self.stops:  # the second signal ends the run at once
            raise KeyboardInterrupt
        self.stops = True


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Inside the context, SIGTERM and SIGINT ask the run to finish and save the current step, then end.

    Python delivers signals only to the main thread; in another thread no request arrives. Raises KeyboardInterrupt at
    the end if the loop has not seen the request.
    """
    request = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.stops:
        raise KeyboardInterrupt


def fit(job: Job) -> tuple[Position, dict[str, Tensor]]:
    """Train `job.model` in place. Returns the position reached and the best weights (the last ones without validation).

    The model ends in evaluation mode with these weights, unless it was sharded. SIGTERM or SIGINT finishes the current
    step or validation batch, saves, then raises KeyboardInterrupt. SwinQuantError, naming the step, if loss or gradient
    is not finite; earlier snapshots stay.
    """
    recipe, world, batches = job.recipe, job.world, job.batches
    precision = Precision.choose(recipe.precision, recipe.half, world.device)
    network = parallel(compiled(precision.network(job.model), recipe), job.model, recipe, world)
    optimizer = make_optimizer(job.model, recipe.optimizer, batches.step_pictures)
    schedule = make_schedule(optimizer, recipe.schedule, recipe.epochs, batches.steps)
    average = make_average(job.model, recipe.ema)
    state = TrainingState(job.model, optimizer, schedule, precision.scaler(), average, Position())
    if job.snapshot:
        state.restore(job.snapshot)
    position = state.position
    snapshots = Snapshots(job.folder / "snapshots", recipe.keep) if job.folder else None
    record = None
    if job.folder and world.is_main:
        record = Record(job.folder, position.total, position.epoch, job.tensorboard)
    saved = time.monotonic()

    features = recipe.distill.features > 0
    with (
        interruption() as request,
        _saved_when_stopped(snapshots, state, job),
        stage_outputs(job.model, features) as ours,
        stage_outputs(job.teacher or job.model, features and job.teacher is not None) as theirs,
        bar(recipe.epochs * batches.steps, position.total) as show,
    ):
        while position.epoch < recipe.epochs and not position.exhausted(recipe.patience):
            network.train()
            started = time.monotonic()
            for step in batches.epoch(position.epoch, position.step):
                parts = torch.zeros((), device=world.device)
                for number, micro in enumerate(step, 1):
                    with gathering(network, number == len(step)):
                        seed_all(job.seed, "step", position.epoch, micro.place)  # drop path
                        part = _loss(job, precision, network, micro, ours, theirs) / len(step)
                        state.scaler.scale(part).backward()
                        parts += part.detach()
                state.scaler.unscale_(optimizer)
                norms = nn.utils.clip_grad_norm_(job.model.parameters(), recipe.optimizer.clip_grad or math.inf)
                norm = whole(norms).item()

                due = snapshots is not None and time.monotonic() - saved > 60 * recipe.save_minutes
                loss, stops, due = _agree(parts.item(), request.stops, due, world)
                _check_finite(loss, norm, state)

                lr, lr_amax = (current_lr(optimizer, role) for role in ("weights", "amax"))
                state.scaler.step(optimizer)
                state.scaler.update()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                job.after_step()
                if average:
                    with precision.between_steps(job.model):
                        average.update(job.model, step=position.total + 1)

                took, started = time.monotonic() - started, time.monotonic()
                position.finish_step(loss, took)
                speed = batches.step_pictures / took
                show(position, loss, lr or 0.0, speed)
                if record:
                    row = {"loss": loss, "lr": lr, "lr_amax": lr_amax, "grad_norm": norm}
                    place = {"total": position.total, "epoch": position.epoch + 1, "step": position.step}
                    record.step(place | row | {"images_per_second": speed})
                if stops:
                    raise StopRequested
                # Save before the first results: a run with results and no snapshot could not go on.
                results = position.epoch == 0 and position.step == batches.steps
                if results or (due and position.step < batches.steps):
                    saved = _save(snapshots, state, job)

            average_buffers(dict.fromkeys((job.model, state.scored)), world)
            with precision.between_steps(job.model):
                extras = job.after_epoch(position.epoch + 1)
            scores = _validate(job, precision, state, request)
            result = {"train_loss": position.loss_sum / batches.steps, **scores, **extras}
            position.finish_epoch(result)
            if record:
                record.epoch(position.epochs[-1], job.histograms())
            if result.get("acc1", -1.0) > position.best_acc1:
                position.best_acc1, position.best_epoch = result["acc1"], position.epoch
                if snapshots:
                    latest = state.weights()
                    if world.is_main:
                        snapshots.save_best({"model": latest, "epoch": position.epoch})
            _stop_if_requested(request, world)
            if snapshots:
                saved = _save(snapshots, state, job)
            log.info("%s", position.summary(recipe.epochs))

    if record:
        record.close()
    wanted = snapshots is not None and recipe.select == "best" and position.best_epoch is not None
    best = None
    if snapshots and world.is_main and wanted and position.best_epoch is not None:
        best = snapshots.best(job.model.state_dict(), position.best_epoch)
    weights = from_main(best)
    if weights is None:
        if wanted:
            log.warning("the weights of epoch %d, the best, are gone: the last ones are kept", position.best_epoch)
            position.best_epoch = position.epoch
        weights = from_main(state.weights())
    precision.finish(job.model)
    if not is_sharded(job.model):
        job.model.load_state_dict(weights)
        job.model.eval()
    return position, weights


def _loss(
    job: Job,
    precision: Precision,
    network: nn.Module,
    micro: MicroBatch,
    ours: list[Tensor],
    theirs: list[Tensor],
) -> Tensor:
    """The loss of one micro-batch: against labels (smoothed, perhaps mixed) and against the teacher's outputs."""
    recipe = job.recipe
    images, targets = (tensor.to(job.world.device, non_blocking=True) for tensor in (micro.images, micro.targets))
    ours.clear()
    if job.model.output_kind != LOGITS:
        return _distance(job, precision, network, images)
    logits = precision.logits(network, images)
    loss = recipe.distill.labels * F.cross_entropy(logits, targets, label_smoothing=recipe.augment.label_smoothing)
    if job.teacher is None:
        return loss
    theirs.clear()
    with torch.no_grad(), precision.autocast():
        wanted = job.teacher(images).float()
    return loss + distillation_loss(recipe.distill, logits, wanted, ours, theirs)


def _distance(job: Job, precision: Precision, network: nn.Module, images: Tensor) -> Tensor:
    """The loss of a model without labels: mean squared error of its maps or embedding against the teacher's, over the
    teacher's mean square, averaged over maps."""
    if job.teacher is None:
        raise UsageError("maps and embeddings are learned from a teacher: give a ‹teacher› FILE")
    with torch.no_grad(), precision.autocast():
        wanted = job.teacher(images)
    found = precision.outputs(network, images)
    pairs = zip(found, [wanted] if isinstance(wanted, Tensor) else wanted, strict=True)
    distances = [F.mse_loss(one, other.float()) / other.float().square().mean() for one, other in pairs]
    return torch.stack(distances).mean()


def _agree(loss: float, stops: bool, due: bool, world: World) -> tuple[float, bool, bool]:
    """The mean loss over ranks, whether any rank must stop, and whether a snapshot is due on any."""
    total, stopping, waiting = all_sum(torch.tensor([loss, stops, due], dtype=torch.float64), world.device).tolist()
    return total / world.size, stopping > 0, waiting > 0


@contextmanager
def _saved_when_stopped(snapshots: Snapshots | None, state: TrainingState, job: Job) -> Iterator[None]:
    try:
        yield
    except StopRequested:
        _save(snapshots, state, job)
        from_main(None)  # a rank that ends would end the others: wait until the main rank has saved
        raise


def _stop_if_requested(request: Interruption, world: World) -> None:
    if all_sum(torch.tensor([float(request.stops)]), world.device).item():
        raise StopRequested


def _check_finite(loss: float, norm: float, state: TrainingState) -> None:
    what = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(norm) else None
    scaler = state.scaler
    if what is None or (what == "gradient" and scaler.is_enabled() and scaler.get_scale() >= 1):
        return  # an overflow: the scaler skips the step and halves its scale
    position = state.position
    raise SwinQuantError(
        f"the {what} is {loss if what == 'loss' else norm} at step {position.step + 1} of epoch {position.epoch + 1} "
        f"(step {position.total + 1} in all): lower the learning rate; what was saved before is kept"
    )


def _validate(job: Job, precision: Precision, state: TrainingState, request: Interruption) -> dict[str, float]:
    """The scores of an epoch. A run that must end here saves, and validates when it goes on."""
    validation = job.validation
    if validation is None:
        return {}

    def batches() -> Iterator[Batch]:
        for batch in validation:
            _stop_if_requested(request, job.world)
            yield batch

    network = precision.view(state.scored).eval()  # `fit` switches back
    engines = {"model": lambda images: precision.logits(network, images)}
    score = evaluate(engines, batches(), job.world.device, collective=is_sharded(job.model))
    return {"val_loss": score["model"].loss, "acc1": score["model"].acc1, "acc5": score["model"].acc5}


def _save(snapshots: Snapshots | None, state: TrainingState, job: Job) -> float:
    if snapshots and (job.world.is_main or is_sharded(job.model)):
        content = state.capture() | {"settings": job.settings}
        if job.world.is_main:
            snapshots.save(state.position.total, content)
    return time.monotonic()


Show = Callable[[Position, float, float, float], None]


@contextmanager
def bar(total: int, done: int) -> Iterator[Show]:
    """Inside the context, a function to call after every step with position, loss, LR and images/s. It draws a bar, or
    prints lines without a terminal."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.2e}  {task.fields[speed]:.0f} images/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=terminal.console, disable=not terminal.shows_bars(), transient=True)
    with progress as display, terminal.Lines(total, done) as lines:
        task = display.add_task("", total=total, completed=done, epoch=1, loss=0.0, lr=0.0, speed=0.0)

        def show(position: Position, loss: float, lr: float, speed: float) -> None:
            display.update(task, completed=position.total, epoch=position.epoch + 1, loss=loss, lr=lr, speed=speed)
            note = f"loss {loss:.3f}, lr {lr:.2e}, {speed:.0f} images/s, "
            lines.show(f"epoch {position.epoch + 1}, steps", position.total, note)

        yield show
