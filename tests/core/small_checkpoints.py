"""Checkpoints of a few numbers, for the tests of how they are written and read."""

import torch

from training.run.checkpoints import checkpoint as checkpoints
from training.run.checkpoints.checkpoint import Checkpoint

RUN = {"identity": {"seed": 0, "data": {"crop": None}}, "data": "abc"}


def state(step, fill=None):
    value = torch.full((2, 3), float(step if fill is None else fill))
    told = {"seconds": 1.5, "scaler": {}, "run": RUN}
    return Checkpoint(step, {"w": value}, {"w": value / 2}, {"w/exp_avg": value * 2}, told)


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in checkpoints.list_steps(folder)]
