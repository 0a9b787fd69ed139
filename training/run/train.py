"""One training run, told from top to bottom.

    data -> plan -> same run before? -> network -> taken up -> loop -> file -> evaluation -> report

Everything random is a function of (seed, absolute step), so that a run that was stopped and taken up again gives the
same bytes as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from ..config.train_config import TrainConfig
from ..data.batches import BatchSource
from ..data.loading import batches as load_batches
from ..data.shards import RefinerDataset
from ..distributed.world import World
from ..objectives.base import Compute, Objective
from ..objectives.choose import choose_objective
from ..objectives.evaluate import FLOAT32
from ..objectives.trainables import build_on, trainables
from ..precision.scaling import needs_scaler
from ..precision.speed import has_tf32
from .cadence import CheckpointCadence
from .checkpoints import checkpoint as checkpoints
from .checkpoints.resume import average_sentence, checkpoint_of, refuse_other_position, restore, resumed_sentences
from .feed import BatchFeed
from .optim.build import begin_from, build_optimizer, exact_weights
from .optim.ema import EMA
from .plan import Plan, make_plan
from .process_settings import run_settings, tf32_allowed
from .recorder import Observer, Recorder, RunResult, Silent, failure_of
from .report import report as reports
from .report.page import PAGE
from .run_folder import RunFolder, this_run
from .state import EXACT, State
from .step import TrainStep
from .validation import Validation
from .watch.health import StepHealth
from .watch.leak_watch import LeakWatch, memory_of

__all__ = ["Observer", "RunResult", "Silent", "train"]


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
        accumulation=config.data.accumulation,
    )
    config = folder.extended(config, config.total_steps(source.per_epoch))
    plan = make_plan(config, data, source.per_epoch)
    config = config.model_copy(update={"precision": plan.precision})  # what "auto" came to is part of the run

    # ---- the same run before? ----------------------------------------------------------------------------------
    folder.claim(config, data.content_hash, plan.total_steps)
    if folder.is_finished():
        message = f"Run {folder.path.name!r} was finished before with this very configuration and data: reused."
        observer.on_message(message)
        return RunResult("reused", folder.path, folder.refiner, reports.read_report(folder.report), message)
    (folder.path / PAGE).unlink(missing_ok=True)  # of an earlier start; this one draws its own
    for choice in plan.choices:
        observer.on_message(choice)

    # ---- network, optimizer, average ---------------------------------------------------------------------------
    world = World(plan.compute.device)
    objective = choose_objective(config, plan.objective, data, plan.compute)
    source.draw = objective.draw()  # noise and times are made where batches are read
    with folder.failures_told(lambda: (0, plan.total_steps)):
        data.verify(should_stop, full=config.data.verify == "full")
        net, ema = _build_network(objective, config, plan.compute)
    optimizer = build_optimizer(config.optimizer, trainables(net), config.seed)
    scaler = _build_scaler(net, plan.compute)
    train_step = TrainStep(
        objective, net, optimizer, scaler, StepHealth(config.health, optimizer, scaler, net, world),
        accumulation=config.data.accumulation, clip_norm=config.optimizer.clip_norm,
        histogram=objective.histogram(), world=world,
        compiled=torch.compile(net) if config.compile else None,  # type: ignore[arg-type]  # a module, says its docs
        accumulating=lambda: tf32_allowed(config.tf32 and has_tf32(world.device)),
    )
    exact = exact_weights(optimizer)

    # ---- begun, or taken up from a checkpoint ------------------------------------------------------------------
    run, parameters = this_run(config, data.content_hash), train_step.parameters
    checkpoint, sentences = checkpoints.take_up(folder.checkpoints, run, parameters, folder.earlier())
    for sentence in sentences:
        observer.on_message(sentence)
    if checkpoint:
        state, resumed = restore(checkpoint, train_step, ema), checkpoint.state
        refuse_other_position(resumed, run, **_position(config, plan, state.step))
        notes = [average_sentence(state.average_of, config)]
    else:
        state, resumed, notes = State(), None, []
        begun = ema.state_dict()  # still the start itself, in float32
        begin_from(optimizer, {parameter: begun[name] for name, parameter in parameters.items()})
    del checkpoint  # its tensors are as large as the network's own
    validation = Validation(config, plan, data, objective, net, ema, exact, parameters)
    notes.append(validation.begun_with(state.measured_as))
    for sentence in filter(None, notes):
        observer.on_message(sentence)

    # ---- loop --------------------------------------------------------------------------------------------------
    recorder = Recorder(folder, config, plan, data, observer, state, train_step.histogram)
    micro, rank, ranks = config.data.accumulation, world.rank, world.size
    feed = BatchFeed(
        load_batches(source, state.step * micro + rank, config.data.workers, world.device, every=ranks)
    )
    watch, leak = LeakWatch(lambda: memory_of(world.device) if config.health.leak_watch else {}), None
    started = time.monotonic()
    cadence = CheckpointCadence(config.checkpoint, started)

    def save() -> None:
        position = _position(config, plan, state.step)
        epoch = plan.epoch_of(state.step, micro)
        recorder.save(
            checkpoint_of(state, train_step, ema, recorder.journal, run=run, epoch=epoch, seed=config.seed, **position)
        )
        cadence.saved(time.monotonic())

    with recorder, closing(feed):
        for sentence in resumed_sentences(resumed, plan, config, recorder.journal) if resumed else ():
            observer.on_message(sentence)
        while True:
            # Validation comes before the step: one that a stop broke off is made up for on resume.
            due = plan.validation.is_due(state.step)
            if due and not should_stop() and not recorder.journal.has(state.step, "validation/loss"):
                recorder.sample = validation.look(state.step, recorder.journal, should_stop)
                if config.keep_best and recorder.journal.best("validation/loss") == state.step:
                    save()

            # One verdict of all ranks a step: whether to stop, and whether any of them has failed.
            last = state.step == plan.total_steps
            failure = leak or (None if last else feed.failure or failure_of(recorder.saver.check))
            if world.agree(should_stop(), failure):
                save()
                return recorder.stopped()
            if last:
                break

            began, rate = time.monotonic(), plan.schedule.rate(state.step)
            result = train_step(
                state.step + 1, feed, rate,
                while_computing=feed.fetch_ahead if state.step + 1 < plan.total_steps else lambda: None,
                before_update=recorder.saver.before_update,
                batches_again=lambda: load_batches(source, state.step * micro + rank, 0, world.device, every=ranks),
                which_checkpoint=recorder.which_checkpoint,
            )
            if result.updated:
                ema.update(state.step, exact if state.average_of == EXACT else None)
            epochs = plan.epoch_of(state.step, micro)
            now = time.monotonic()
            state.step, state.seconds, started = state.step + 1, state.seconds + now - started, now
            recorder.speed.add(now - began, feed.waited(), train_step.flops)
            recorder.step(result, rate, train_step.health.journalled())
            leak = failure_of(lambda: watch.look(state.step))
            ended, saver = plan.epoch_of(state.step, micro) > epochs, recorder.saver
            due = cadence.is_due(
                state.step, now, epoch_ended=ended, cost=saver.seconds, writing=saver.is_writing()
            )
            if due or state.step == plan.total_steps:  # from the last one a longer run goes on
                save()

        train_step.health.refuse_if_nothing_was_learnt(state.step)

        # ---- the file ----------------------------------------------------------------------------------------------
        objective.save(folder.refiner, ema.state_dict(), steps=plan.total_steps, adapters=folder.lora)

        # ---- evaluation and report ---------------------------------------------------------------------------------
        observer.on_message(f"Trained. Measuring {'the held-out' if data.held_out else 'some training'} pairs.")
        with ema.swapped(net):
            measured = objective.evaluate(
                objective.saved(folder.refiner, net), data.held_out or data.train[:4], version=FLOAT32,
                on_pair=observer.on_measure, should_stop=should_stop,
            )
        if should_stop():  # the last step is in a checkpoint: queued again, the run goes on right here
            return recorder.stopped()
        return recorder.done(measured, {"loss_scale": train_step.health.state(), "memory": watch.summary()})


# ---- the parts of it --------------------------------------------------------------------------------------------


def _build_network(objective: Objective, config: TrainConfig, compute: Compute) -> tuple[nn.Module, EMA]:
    """(the network in training, on its device and in its dtype; its average, in float32)."""
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers are not ours to move

        def weights() -> dict[str, Tensor]:
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would move those of the GPUs, too
            return objective.first_weights()

        net: Any = build_on(compute.device, objective.network, weights).train()
    ema = EMA(net, config.ema_decay)  # before the weights are rounded
    nn.Module.to(net, compute.weights)  # diffusers' own `to` warns of an empty list
    if config.channels_last:
        nn.Module.to(net, memory_format=torch.channels_last)
    if config.gradient_checkpointing:
        net.enable_gradient_checkpointing()  # diffusers passes use_reentrant=False
    return net, ema


def _build_scaler(net: nn.Module, compute: Compute) -> torch.amp.GradScaler:
    trained = (parameter.dtype for parameter in trainables(net).values())
    return torch.amp.GradScaler(compute.device.type, enabled=needs_scaler(compute.autocast or compute.weights, trained))


def _position(config: TrainConfig, plan: Plan, step: int) -> dict[str, Any]:
    """What comes after `step` finished ones: the absolute index of its first micro-batch, and its learning rate."""
    return {"micro_step": step * config.data.accumulation, "learning_rate": plan.schedule.rate(step)}
