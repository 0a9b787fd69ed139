"""An observer of training.run.train.train that times its steps in blocks and does something else between two blocks."""

from __future__ import annotations

import time
from collections.abc import Callable


class StepClock:
    """Give it to `train` as observer, and its `should_stop` as well.

    A step's duration runs from the end of the step before it, so all that the loop does is in it: loading the batch,
    the step, the journal, and a checkpoint that the step before it called for. What `between` does is not.

    block: steps of a block. between(durations) -> whether to go on; gets the seconds of each step of the block.
    """

    pictures = False

    def __init__(self, block: int, between: Callable[[list[float]], bool]):
        self.block, self.between = block, between
        self.durations: list[float] = []
        self.enough = False
        self.began = time.perf_counter()  # the first step has the run's set-up in it: leave the first block out

    def on_step(self, step: int, total: int, loss: float, eta: float) -> None:
        self.durations.append(time.perf_counter() - self.began)
        if len(self.durations) == self.block:
            durations, self.durations = self.durations, []
            self.enough = not self.between(durations)
        self.began = time.perf_counter()

    def on_picture(self, picture) -> None: ...

    def on_measure(self, done: int, total: int) -> None: ...

    def on_message(self, text: str) -> None: ...

    def should_stop(self) -> bool:
        return self.enough
