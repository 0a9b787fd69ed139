"""What is written and told of a run: journal, page, memory and speed, checkpoints, status, and whoever watches.

With several processes the first one alone has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .checkpoints import checkpoint as checkpoints
from .checkpoints.background import BackgroundSaver
from .checkpoints.checkpoint import Checkpoint
from .plan import pace_remark
from .report import report as reports
from .report.journal import Journal
from .report.memory_log import MemoryLog
from .report.page import RunPage
from .watch.leak_watch import memory_of
from .watch.speed import Speed, peak_flops

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..config.train_config import TrainConfig
    from ..data.shards import RefinerDataset
    from ..objectives.base import Histogram
    from ..objectives.evaluate import Evaluation
    from .plan import Plan
    from .run_folder import RunFolder
    from .state import State
    from .step import StepResult

__all__ = ["Observer", "Recorder", "RunResult", "Silent", "failure_of"]


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


class Recorder:
    """As a context manager it is open for the loop; a failure within becomes the run's status and its page."""

    def __init__(
        self,
        folder: RunFolder,
        config: TrainConfig,
        plan: Plan,
        data: RefinerDataset,
        observer: Observer,
        state: State,
        histogram: Histogram,
    ):
        self.folder, self.config, self.plan, self.data = folder, config, plan, data
        self.observer, self.state, self.histogram = observer, state, histogram
        self.saver = BackgroundSaver(folder.checkpoints, config.keep_checkpoints)
        dtype = plan.compute.autocast or plan.compute.weights
        self.speed = Speed(peak_flops(plan.compute.device, dtype))
        self.sample: Image | None = None  # of the last validation
        self._page: RunPage | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        state, total = self.state, self.plan.total_steps
        with ExitStack() as stack:
            stack.enter_context(self.folder.failures_told(lambda: (state.step, total), self._draw_failed))
            self.journal = stack.enter_context(closing(Journal(self.folder.path, state.step)))
            stack.enter_context(self.saver)
            device = self.plan.compute.device
            self._memory = MemoryLog(self.folder.path, state.step, total, lambda: memory_of(device))
            self._speed = MemoryLog(self.folder.path, state.step, total, lambda: self.speed.last, "speed.jsonl")
            self._page = RunPage(self.folder.path, self.config, self.plan, self.data, self.journal, self._memory)
            self.folder.set_status("running", state.step, total)
            if self.journal.without_board:
                self.message(self.journal.without_board)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def message(self, text: str) -> None:
        self.observer.on_message(text)

    # ---- while the loop runs -----------------------------------------------------------------------------------------

    def step(self, result: StepResult, learning_rate: float, also: dict[str, float]) -> None:
        """The step that was just taken. also: what else the journal notes of it."""
        state, plan, observer = self.state, self.plan, self.observer
        self.journal.write(
            state.step, loss=result.loss, learning_rate=learning_rate, gradient_norm=result.norm, **also
        )
        self._memory.look(state.step)
        self._speed.look(state.step)
        observer.on_step(state.step, plan.total_steps, result.loss, state.remaining(plan.total_steps))
        if state.steps_here == 1 and (remark := pace_remark(plan, state.seconds - state.seconds_before, state.step)):
            self.message(remark)
        every = max(1, plan.total_steps // 40)
        if observer.pictures and state.step % every == 0:
            show_sample = self.sample is not None and (state.step // every) % 2 == 1
            nothing = plan.objective.loss_of_nothing
            observer.on_picture(self.sample if show_sample else reports.loss_picture(self.journal, nothing))

    def save(self, checkpoint: Checkpoint) -> None:
        best = self.journal.best("validation/loss") if self.config.keep_best else None
        self.saver.save(checkpoint, best)

    def which_checkpoint(self) -> str:
        """The one that the run would go on from, for a sentence."""
        self.saver.wait()
        return checkpoints.kept(self.folder.checkpoints)

    # ---- how it ends -------------------------------------------------------------------------------------------------

    def stopped(self) -> RunResult:
        self.saver.wait()
        total = self.plan.total_steps
        message = f"Stopped at step {self.state.step} of {total}; started again, the run goes on from there."
        self.folder.set_status("stopped", self.state.step, total, message)
        self.message(message)
        self._draw_page("stopped", message)
        return RunResult("stopped", self.folder.path, self.folder.refiner, {}, message)

    def done(self, measured: Evaluation, watched: dict[str, Any]) -> RunResult:
        self.saver.wait()
        state, total = self.state, self.plan.total_steps
        message = f"Trained {total} steps ({self.plan.epochs:g} epochs) in {state.seconds:.0f} s."
        self._draw_page("done", message, measured)
        report = reports.write(
            self.folder.path, self.config, self.plan, self.data, self.journal, measured,
            seconds=state.seconds, steps_here=state.steps_here, held_out=bool(self.data.held_out),
            watched={"times": self.histogram.as_json(), **watched, "speed": self.speed.summary()},
        )
        self.folder.set_status("done", state.step, total, message)
        self.message(message)
        return RunResult("done", self.folder.path, self.folder.refiner, report, message)

    def _draw_failed(self, sentence: str) -> None:
        self._draw_page("failed", sentence)

    def _draw_page(self, status: str, message: str, measured: Evaluation | None = None) -> None:
        if self._page is None:
            return
        complaint = self._page.write(status, message, self.state.seconds, self.histogram.as_json(), measured)
        if complaint:
            self.message(complaint)


def failure_of(*checks: Callable[[], None]) -> Exception | None:
    """What the first of these raises, if any does."""
    for check in checks:
        try:
            check()
        except Exception as error:
            return error
    return None
