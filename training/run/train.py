"""One training run, told from top to bottom.

    data -> plan -> same run before? -> network -> loop -> file -> evaluation -> report

Everything random is a function of (seed, absolute step), so that a run that was stopped and taken up again gives the
same bytes as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config.train_config import TrainConfig
from ..data.batches import BatchSource
from ..data.loading import batches as load_batches
from ..data.shards import RefinerDataset
from ..objectives.choose import choose_objective
from ..objectives.evaluate import FLOAT32, Evaluation
from ..objectives.trainables import fill, trainables
from ..precision.guard import FirstBadLayer
from ..precision.scaling import needs_scaler
from ..precision.speed import has_tf32
from .cadence import CheckpointCadence
from .checkpoints import checkpoint as checkpoints
from .checkpoints.background import BackgroundSaver
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.resume import EXACT, ROUNDED, average_sentence, loop_state, refuse_other_position, resumed_sentences
from .optim.build import begin_from, build_optimizer, exact_weights
from .optim.ema import EMA
from .plan import make_plan, pace_remark
from .process_settings import run_settings, tf32_allowed
from .report import report as reports
from .report.journal import Journal
from .report.memory_log import MemoryLog
from .report.page import PAGE, RunPage
from .run_folder import RunFolder, this_run
from .validation import Validation
from .watch.health import StepHealth
from .watch.leak_watch import LeakWatch, memory_of
from .watch.nan_origin import find_origin, refuse_without_gradient


class Observer(Protocol):
    """Who watches: the node's progress bar, tqdm, or nobody. Called from the training thread."""

    pictures: bool  # whether drawing for it is worth the time

    def on_step(self, step: int, total: int, loss: float, eta: float) -> None: ...
    def on_picture(self, picture) -> None: ...  # a PIL picture: loss curve and validation sample in turn
    def on_measure(self, done: int, total: int) -> None: ...  # held-out pairs, after the last step
    def on_message(self, text: str) -> None: ...


class Silent:
    pictures = False

    def on_step(self, step, total, loss, eta): ...
    def on_picture(self, picture): ...
    def on_measure(self, done, total): ...
    def on_message(self, text): ...


@dataclass(frozen=True)
class RunResult:
    status: str  # "done", "stopped" (by should_stop) or "reused" (the same run was finished before)
    folder: Path
    refiner: Path
    report: dict[str, Any]
    message: str


def train(
    config: TrainConfig, observer: Observer | None = None, should_stop: Callable[[], bool] = lambda: False
) -> RunResult:
    """Train a refiner as `config` says; returns when it is done, stopped, or found finished.

    Raises BadInput (something given does not fit) and TrainingFailed (numbers went wrong; checkpoints are kept).
    """
    folder = RunFolder(config.run)
    try:
        with run_settings(config.deterministic):
            return _train(config, folder, observer or Silent(), should_stop)
    finally:
        folder.release()


def _train(config: TrainConfig, folder: RunFolder, observer: Observer, should_stop: Callable[[], bool]) -> RunResult:
    """The run, in a folder that the caller releases."""
    config = folder.as_begun(config)

    # ---- data and plan -----------------------------------------------------------------------------------------
    data = RefinerDataset.open(config.dataset)
    source = BatchSource(
        config.dataset,
        batch_size=config.data.batch_size,
        repeats=config.data.repeats,
        seed=config.seed,
        crop=config.data.crop,
        flip=config.data.mirror,
        caption_dropout=config.data.caption_dropout,
    )
    config = folder.extended(config, config.total_steps(source.per_epoch))
    plan = make_plan(config, data, source.per_epoch)
    config = config.model_copy(update={"precision": plan.precision})  # what "auto" came to is part of the run

    # ---- the same run before? ----------------------------------------------------------------------------------
    folder.claim(config, data.content_hash, plan.total_steps)
    if folder.is_finished():
        message = f"Run {folder.path.name!r} was finished before with this very configuration and data: reused."
        observer.on_message(message)
        return RunResult("reused", folder.path, folder.refiner, reports.read(folder.report), message)
    (folder.path / PAGE).unlink(missing_ok=True)  # of an earlier start; this one draws its own
    for choice in plan.choices:
        observer.on_message(choice)

    # ---- network, optimizer, average ---------------------------------------------------------------------------
    objective = choose_objective(config, plan.objective, data, plan.compute)
    with folder.failures_told(lambda: (0, plan.total_steps)):
        data.verify(should_stop)
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to move
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would move those of the GPUs, too
            net = objective.network()
        torch.nn.Module.to(net, plan.compute.device).train()  # diffusers' own `to` warns of an empty list
        ema = EMA(net, config.ema_decay)  # before the weights are rounded
        torch.nn.Module.to(net, plan.compute.weights)
        if config.channels_last:
            torch.nn.Module.to(net, memory_format=torch.channels_last)
        if config.gradient_checkpointing:
            net.enable_gradient_checkpointing()  # diffusers passes use_reentrant=False
    network = torch.compile(net) if config.compile else net  # the same weights; `net` is asked everything but the loss
    parameters = trainables(net)
    optimizer = build_optimizer(config.optimizer, parameters, config.seed)
    exact = exact_weights(optimizer)
    compute = plan.compute
    scaled = needs_scaler(compute.autocast or compute.weights, (parameter.dtype for parameter in parameters.values()))
    scaler = torch.amp.GradScaler(compute.device.type, enabled=scaled)
    health, times = StepHealth(config.health, optimizer, scaler, net), objective.histogram()
    step, seconds = 0, 0.0
    run = this_run(config, data.content_hash)
    found, said = checkpoints.take_up(folder.checkpoints, run, parameters, folder.earlier())
    for sentence in said:
        observer.on_message(sentence)
    if found:
        fill(parameters, found.weights)
        ema.load_state_dict(found.ema)
        checkpoints.restore_optimizer(optimizer, parameters, found.optimizer)
        scaler.load_state_dict(found.state["scaler"])
        health.restore(found.state.get("health", {}))
        times.restore(found.state.get("times", {}))
        step, seconds = found.step, found.state["seconds"]
    else:
        begun = ema.state_dict()  # still the start itself, in float32
        begin_from(optimizer, {parameter: begun[name] for name, parameter in parameters.items()})
    resumed, found = found.state if found else None, None  # its tensors are as large as the network's own

    # ---- loop --------------------------------------------------------------------------------------------------
    names = {parameter: name for name, parameter in parameters.items()}

    def next_up() -> dict[str, Any]:
        return {"micro_step": step * config.data.accumulation, "learning_rate": plan.schedule.rate(step)}

    def save() -> None:
        epoch = plan.epoch_of(step, config.data.accumulation)
        place = loop_state(epoch=epoch, seed=config.seed, journal=journal, device=plan.compute.device, **next_up())
        state = {"run": run, "seconds": seconds, "scaler": scaler.state_dict(), **place}
        state |= {"health": health.state(), "times": times.state(), "measures": validation.version}
        state |= {"average": average_of}
        tensors = checkpoints.optimizer_tensors(optimizer, names)
        best = journal.best("validation/loss") if config.keep_best else None
        saver.save(Checkpoint(step, parameters, ema.state_dict(), tensors, state), best)
        cadence.saved(time.monotonic())

    def stopped() -> RunResult:
        saver.wait()
        message = f"Stopped at step {step} of {plan.total_steps}; started again, the run goes on from there."
        folder.set_status("stopped", step, plan.total_steps, message)
        observer.on_message(message)
        draw_page("stopped", message)
        return RunResult("stopped", folder.path, folder.refiner, {}, message)

    def draw_page(state: str, message: str, measured: Evaluation | None = None) -> None:
        complaint = page.write(state, message, seconds, times.as_json(), measured) if page else ""
        if complaint:
            observer.on_message(complaint)

    def replay(scale: float) -> str:
        """What went wrong first in the step at hand, by taking it once more."""

        def backward() -> None:
            with closing(load_batches(source, next_up()["micro_step"], 0, plan.compute.device)) as again:
                for _ in range(config.data.accumulation):
                    weighted, _ = objective.loss(net, next(again))
                    (weighted / config.data.accumulation * scale).backward()

        return find_origin(net, backward, FirstBadLayer)

    def kept() -> str:
        saver.wait()
        return checkpoints.kept(folder.checkpoints)

    validation = Validation(config, plan, data, objective, net, ema, exact, parameters)
    average_of = resumed.get("average", ROUNDED) if resumed else EXACT
    if resumed:
        refuse_other_position(resumed, run, **next_up())
        if sentence := average_sentence(average_of, config):
            observer.on_message(sentence)
        if sentence := validation.begun_with(resumed.get("measures", 1)):
            observer.on_message(sentence)
    batches = load_batches(source, next_up()["micro_step"], config.data.workers, plan.compute.device)
    saver = BackgroundSaver(folder.checkpoints, config.keep_checkpoints)
    cadence = CheckpointCadence(config.checkpoint, time.monotonic())
    show_every = max(1, plan.total_steps // 40)
    watch = LeakWatch(lambda: memory_of(plan.compute.device) if config.health.leak_watch else {})
    sample_picture, started, began_at, seconds_before = None, time.monotonic(), step, seconds
    page: RunPage | None = None
    with (
        folder.failures_told(lambda: (step, plan.total_steps), lambda said: draw_page("failed", said)),
        closing(batches), closing(Journal(folder.path, step)) as journal, saver,
    ):
        memory = MemoryLog(folder.path, step, plan.total_steps, lambda: memory_of(plan.compute.device))
        page = RunPage(folder.path, config, plan, data, journal, memory)
        folder.set_status("running", step, plan.total_steps)
        if journal.without_board:
            observer.on_message(journal.without_board)
        for sentence in resumed_sentences(resumed, plan, config, journal) if resumed else ():
            observer.on_message(sentence)
        while True:
            # Validation comes before the step: one that a stop broke off is made up for on resume.
            due = plan.validation.is_due(step)
            if due and not should_stop() and not journal.has(step, "validation/loss"):
                sample_picture = validation.look(step, journal, should_stop)
                if config.keep_best and journal.best("validation/loss") == step:
                    save()
            if should_stop():
                save()
                return stopped()
            if step == plan.total_steps:
                break

            saver.check()
            rate = plan.schedule.rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            total = 0.0
            with tf32_allowed(config.tf32 and has_tf32(plan.compute.device)):
                for _ in range(config.data.accumulation):
                    weighted, loss = objective.loss(network, next(batches), times)
                    scaler.scale(weighted / config.data.accumulation).backward()
                    total += float(loss / config.data.accumulation)
            if step == began_at:
                refuse_without_gradient(net, parameters, step + 1)
            scaler.unscale_(optimizer)
            norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_norm))
            saver.before_update()
            taken = health.take(step + 1, total, norm, replay, kept)
            optimizer.zero_grad()
            if taken:
                ema.update(step, exact if average_of == EXACT else None)
            before, step = step, step + 1

            journal.write(step, loss=total, learning_rate=rate, gradient_norm=norm, **health.journalled())
            seconds += time.monotonic() - started
            started = time.monotonic()
            memory.look(step)
            watch.look(step)
            observer.on_step(step, plan.total_steps, total, _eta(seconds, step, plan.total_steps))
            if step == began_at + 1 and (remark := pace_remark(plan, seconds - seconds_before, step)):
                observer.on_message(remark)
            if observer.pictures and step % show_every == 0:
                show_sample = sample_picture is not None and (step // show_every) % 2 == 1
                curve = None if show_sample else reports.loss_picture(journal, plan.objective.loss_of_nothing)
                observer.on_picture(sample_picture if show_sample else curve)
            ended = plan.epoch_of(step, config.data.accumulation) > plan.epoch_of(before, config.data.accumulation)
            writing = saver.is_writing()
            due = cadence.is_due(step, time.monotonic(), epoch_ended=ended, cost=saver.seconds, writing=writing)
            if due or step == plan.total_steps:  # from the last one a longer run goes on
                save()

        health.refuse_nothing(step)

        # ---- the file ----------------------------------------------------------------------------------------------
        objective.save(folder.refiner, ema.state_dict(), steps=plan.total_steps, adapters=folder.lora)

        # ---- evaluation and report ---------------------------------------------------------------------------------
        observer.on_message(f"Trained. Measuring {'the held-out' if data.held_out else 'some training'} pairs.")
        saved = objective.saved(folder.refiner, ema.net)
        measured = objective.evaluate(
            saved, data.held_out or data.train[:4], version=FLOAT32, on_pair=observer.on_measure,
            should_stop=should_stop,
        )
        if should_stop():  # the last step is in a checkpoint: queued again, the run goes on right here
            return stopped()
        saver.wait()
        message = f"Trained {plan.total_steps} steps ({plan.epochs:g} epochs) in {seconds:.0f} s."
        draw_page("done", message, measured)
        report = reports.write(
            folder.path, config, plan, data, journal, measured,
            seconds=seconds, steps_here=step - began_at, held_out=bool(data.held_out),
            watched={"times": times.as_json(), "loss_scale": health.state(), "memory": watch.summary()},
        )
        folder.set_status("done", step, plan.total_steps, message)
        observer.on_message(message)
        return RunResult("done", folder.path, folder.refiner, report, message)


# ---- the parts of it --------------------------------------------------------------------------------------------


def _eta(seconds: float, step: int, total: int) -> float:
    return seconds / step * (total - step)
