"""The training loop of float training and QAT: read `fit` from top to bottom.

Other files choose the pictures of a step (`batches`), parameter groups and LR (`optim`), the teacher's part of the loss
(`distill`), half precision (`precision`) and the ranges of nodes (`amax`), and write snapshots (`snapshot`).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_quant.base.compat import import_timm
from swin_quant.base.distributed import World, all_sum, from_main
from swin_quant.base.errors import SwinQuantError, UsageError
from swin_quant.base.progress import Lines, log, make_bar, track
from swin_quant.config.outputs import LOGITS
from swin_quant.data.loader import Batch, LoaderKilled
from swin_quant.data.sampling import seed_all
from swin_quant.models.classifier import Classifier
from swin_quant.score.scoring import evaluate
from swin_quant.train.batches import MicroBatch, TrainingBatches, ValidationBatches
from swin_quant.train.distill import kl_divergence
from swin_quant.train.optim import make_optimizer, make_schedule
from swin_quant.train.outdir import Record
from swin_quant.train.parallel import Precision, average_buffers, gathering, is_sharded, parallel, whole
from swin_quant.train.recipe import Recipe
from swin_quant.train.snapshot import Position, Snapshots, TrainingState


@dataclass
class Job:
    """The settings of a training: model, recipe, pictures, and the output folder (None writes nothing).

    `snapshot`: the snapshot to go on from. `settings` are stored in every snapshot and compared when the run goes on.
    `after_step()` and `after_epoch(epochs done)` adapt ranges to the new weights; the figures that `after_epoch`
    returns are recorded with the epoch.
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
    after_step: Callable[[], None] = lambda: None
    after_epoch: Callable[[int], dict[str, float]] = lambda epoch: {}


Show = Callable[[Position, float, float, float], None]  # position, loss, LR, images/s


class StopRequested(KeyboardInterrupt):
    """A signal asked the run to end; all ranks raise this at the same step."""


@contextmanager
def interruption() -> Iterator[threading.Event]:
    """Inside the context, SIGTERM and SIGINT ask the run to finish and save the current step, then end.

    They set the event. Python delivers signals only to the main thread; in another thread no request arrives. Raises
    KeyboardInterrupt at the second signal, and at the end if the loop has not seen the request.
    """
    request = threading.Event()

    def ask(number: int, frame: object) -> None:
        if request.is_set():
            raise KeyboardInterrupt
        request.set()

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.is_set():
        raise KeyboardInterrupt


def fit(job: Job) -> tuple[Position, dict[str, Tensor]]:
    """Train `job.model` in place. Returns the position reached and the best weights (the last ones without validation).

    The model ends in evaluation mode with these weights, unless it was sharded. SIGTERM or SIGINT finishes the current
    step or validation batch, saves, then raises KeyboardInterrupt. LoaderKilled, after saving, too. SwinQuantError,
    naming the step, if loss or gradient is not finite; earlier snapshots stay.
    """
    recipe, batches = job.recipe, job.batches
    with interruption() as request:
        run = _Run(job, request)
        position = run.state.position
        try:
            with bar(recipe.epochs * batches.steps, position.total) as show:
                while position.epoch < recipe.epochs:
                    if position.epoch - (position.best_epoch or position.epoch) >= (recipe.patience or math.inf):
                        break
                    run.network.train()
                    run.started = time.monotonic()  # the first step is timed from here, its pictures included
                    for step in batches.epoch(position.epoch, position.step):
                        run.step(step, show)
                    run.end_epoch()
        except StopRequested:
            run.save()
            from_main(None)  # a rank that ends would end the others: wait until the main rank has saved
            raise
        except LoaderKilled:  # between two steps, or during validation
            if not is_sharded(job.model):  # other ranks do not know
                run.save()
            raise
    return position, run.finish()


class _Run:
    """A training under way: the network as it is trained, its state, and where snapshots and records go."""

    def __init__(self, job: Job, request: threading.Event) -> None:
        recipe, world = job.recipe, job.world
        self.job, self.request = job, request
        self.precision = Precision.choose(recipe.precision, recipe.half, world.device)
        self.network = parallel(self.precision.network(job.model), job.model, recipe, world)
        optimizer = make_optimizer(job.model, recipe.optimizer, job.batches.step_pictures)
        schedule = make_schedule(optimizer, recipe.schedule, recipe.epochs, job.batches.steps)
        average = None
        if recipe.ema:
            import_timm()
            from timm.utils import ModelEmaV3

            average = ModelEmaV3(job.model, decay=recipe.ema, use_warmup=True, dtype=torch.float32)
        self.state = TrainingState(job.model, optimizer, schedule, self.precision.scaler(), average, Position())
        if job.snapshot:
            self.state.restore(job.snapshot)
        position = self.state.position
        self.snapshots = Snapshots(job.folder / "snapshots", recipe.keep) if job.folder else None
        self.record = None
        if job.folder and world.is_main:
            self.record = Record(job.folder, position.total, position.epoch)
        self.saved = self.started = time.monotonic()

    def step(self, micros: Sequence[MicroBatch], show: Show) -> None:
        """Take one optimizer step on the micro-batches, and save a snapshot if one is due."""
        job, state, position = self.job, self.state, self.state.position
        loss, norm = self._gradients(micros)
        due = self.snapshots is not None and time.monotonic() - self.saved > 60 * job.recipe.save_minutes
        loss, stops, due = _agree(loss, self.request.is_set(), due, job.world)
        what = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(norm) else None
        # Where a gradient alone overflows, the scaler skips the step and halves its scale
        if what == "loss" or (what and not (state.scaler.is_enabled() and state.scaler.get_scale() >= 1)):
            raise SwinQuantError(
                f"the {what} is {loss if what == 'loss' else norm} at step {position.step + 1} of epoch "
                f"{position.epoch + 1} (step {position.total + 1} in all): lower the learning rate; what was saved "
                "before is kept"
            )
        groups: list[dict[str, Any]] = state.optimizer.param_groups
        rates = {
            key: max((group["lr"] for group in groups if group["role"] == role), default=None)
            for key, role in (("lr", "weights"), ("lr_amax", "amax"))
        }
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        state.schedule.step()
        job.after_step()
        if state.average:
            state.average.update(job.model, step=position.total + 1)

        took, self.started = time.monotonic() - self.started, time.monotonic()
        position.step, position.total = position.step + 1, position.total + 1
        position.loss_sum, position.seconds = position.loss_sum + loss, position.seconds + took
        speed = job.batches.step_pictures / took
        show(position, loss, rates["lr"] or 0.0, speed)
        if self.record:
            place = {"total": position.total, "epoch": position.epoch + 1, "step": position.step}
            self.record.steps.add(place | {"loss": loss, **rates, "grad_norm": norm, "images_per_second": speed})
        if stops:
            raise StopRequested
        # Save before the first results: a run with results and no snapshot could not go on.
        results = position.epoch == 0 and position.step == job.batches.steps
        if results or (due and position.step < job.batches.steps):
            self.save()

    def _gradients(self, micros: Sequence[MicroBatch]) -> tuple[float, float]:
        """This rank's loss and the norm of the gradient, which is left in the parameters, clipped."""
        job, state = self.job, self.state
        loss = torch.zeros((), device=job.world.device)
        for number, micro in enumerate(micros, 1):
            with gathering(self.network, number == len(micros)):
                seed_all(job.seed, "step", state.position.epoch, micro.place)  # drop path
                part = self._loss(micro) / len(micros)
                state.scaler.scale(part).backward()
                loss += part.detach()
        state.scaler.unscale_(state.optimizer)
        norms = nn.utils.clip_grad_norm_(job.model.parameters(), job.recipe.optimizer.clip_grad or math.inf)
        return loss.item(), whole(norms).item()

    def _loss(self, micro: MicroBatch) -> Tensor:
        """The loss against labels and the teacher; without labels, the teacher's relative mean squared error."""
        job, recipe, device = self.job, self.job.recipe, self.job.world.device
        images, targets = (tensor.to(device, non_blocking=True) for tensor in (micro.images, micro.targets))
        if job.model.output_kind != LOGITS:
            if job.teacher is None:
                raise UsageError("maps and embeddings are learned from a teacher: give a ‹teacher› FILE")
            with torch.no_grad(), self.precision.autocast():
                given = job.teacher(images)
            pairs = zip(
                self.precision.outputs(self.network, images),
                [given] if isinstance(given, Tensor) else given,
                strict=True,
            )
            distances = [F.mse_loss(one, other.float()) / other.float().square().mean() for one, other in pairs]
            return torch.stack(distances).mean()
        logits = self.precision.logits(self.network, images)
        smoothing = recipe.augment.label_smoothing
        loss = recipe.distill.labels * F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if job.teacher is None:
            return loss
        with torch.no_grad(), self.precision.autocast():
            wanted = job.teacher(images).float()
        distill = recipe.distill
        return loss + distill.weight * kl_divergence(logits, wanted, distill.temperature, distill.compat)

    def end_epoch(self) -> None:
        """Validate, record the epoch, and save the weights if they are the best so far, then a snapshot."""
        job, state, position = self.job, self.state, self.state.position
        average_buffers(dict.fromkeys((job.model, state.scored)), job.world)
        extras = job.after_epoch(position.epoch + 1)
        result = {"train_loss": position.loss_sum / job.batches.steps, **self._validate(), **extras}
        position.epoch += 1
        row = {"epoch": position.epoch, "total": position.total, **result, "seconds": position.seconds}
        position.epochs.append(row)
        position.step, position.loss_sum, position.seconds = 0, 0.0, 0.0
        if self.record:
            self.record.epochs.add(row)
        if result.get("acc1", -1.0) > position.best_acc1:
            position.best_acc1, position.best_epoch = result["acc1"], position.epoch
            if self.snapshots:
                latest = state.weights()
                if job.world.is_main:
                    self.snapshots.save_best({"model": latest, "epoch": position.epoch})
        self.stop_if_requested()
        self.save()
        scored = f", val top-1 {row['acc1']:.2f} %, loss {row['val_loss']:.4f}" if "acc1" in row else ""
        best = f" (best {position.best_acc1:.2f} in epoch {position.best_epoch})" if position.best_epoch else ""
        line = f"loss {row['train_loss']:.4f}{scored}{best}, {row['seconds']:.0f} s"
        log.info("epoch %d/%d: %s", position.epoch, job.recipe.epochs, line)

    def _validate(self) -> dict[str, float]:
        """The scores of an epoch. A run that must end here saves, and validates when it goes on."""
        job, validation = self.job, self.job.validation
        if validation is None:
            return {}

        def batches() -> Iterator[Batch]:
            for batch in track(validation, "validation", len(validation.parts), "batches"):
                self.stop_if_requested()
                yield batch

        network = self.precision.network(self.state.scored).eval()  # the next epoch switches back
        engines = {"model": lambda images: self.precision.logits(network, images)}
        score = evaluate(engines, batches(), job.world.device, collective=is_sharded(job.model))
        return {"val_loss": score["model"].loss, "acc1": score["model"].acc1, "acc5": score["model"].acc5}

    def stop_if_requested(self) -> None:
        """Raise StopRequested on all ranks if any was asked to end."""
        if all_sum(torch.tensor([float(self.request.is_set())]), self.job.world.device).item():
            raise StopRequested

    def save(self) -> None:
        """Write a snapshot, if the run has a folder."""
        job, state = self.job, self.state
        if self.snapshots and (job.world.is_main or is_sharded(job.model)):
            content = state.capture() | {"settings": job.settings}
            if job.world.is_main:
                self.snapshots.save(state.position.total, content)
        self.saved = time.monotonic()

    def finish(self) -> dict[str, Tensor]:
        """Return the weights that the recipe selects, loaded into the model unless sharded."""
        job, state, position = self.job, self.state, self.state.position
        best, number = None, position.best_epoch
        wanted = self.snapshots is not None and job.recipe.select == "best" and number is not None
        if self.snapshots and job.world.is_main and wanted and number is not None:
            best = self.snapshots.best(job.model.state_dict(), number)
        weights = from_main(best)
        if weights is None:
            if wanted:
                log.warning("the weights of epoch %d, the best, are gone: the last ones are kept", number)
                position.best_epoch = position.epoch
            weights = from_main(state.weights())
        self.precision.finish(job.model)
        if not is_sharded(job.model):
            job.model.load_state_dict(weights)
            job.model.eval()
        return weights


def _agree(loss: float, stops: bool, due: bool, world: World) -> tuple[float, bool, bool]:
    """The mean loss over ranks, whether any rank must stop, and whether a snapshot is due on any."""
    total, stopping, waiting = all_sum(torch.tensor([loss, stops, due], dtype=torch.float64), world.device).tolist()
    return total / world.size, stopping > 0, waiting > 0


@contextmanager
def bar(total: int, done: int) -> Iterator[Show]:
    """Inside the context, a function to call after every step with position, loss, LR and images/s. It draws a bar, or
    prints lines without a terminal."""
    figures = "loss {task.fields[loss]:.3f}  lr {task.fields[lr]:.2e}  {task.fields[speed]:.0f} images/s"
    lines = Lines(total, done, "steps")
    with make_bar("epoch {task.fields[epoch]}", figures) as display:
        task = display.add_task("", total=total, completed=done, epoch=1, loss=0.0, lr=0.0, speed=0.0)

        def show(position: Position, loss: float, lr: float, speed: float) -> None:
            display.update(task, completed=position.total, epoch=position.epoch + 1, loss=loss, lr=lr, speed=speed)
            note = f"loss {loss:.3f}, lr {lr:.2e}, {speed:.0f} images/s, "
            lines.show(f"epoch {position.epoch + 1}", position.total, note)

        yield show
