"""Micro-batches from loader processes, and what goes wrong in one of them told where it can be heard."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import BadInput, TrainingFailed
from .batches import BatchSource
from .prefetch import prefetched

__all__ = ["batches", "is_dead_loader"]

_PATIENCE = 5.0  # seconds that a process has to end by itself


def batches(
    source: BatchSource, first: int, workers: int, device: torch.device, every: int = 1
) -> Generator[dict[str, Any], None, None]:
    """Micro-batches from the absolute index `first` on, each or every so many, without end, on the device.

    Without loader processes a thread reads ahead; closing the iterator ends it, or them. What goes wrong with a batch
    is raised in its place, whether it was read in another process or here: a BadInput as it was, anything else as
    TrainingFailed with its kind and message.
    """
    context = _recording_context()
    loader = DataLoader(
        _Carrying(source),
        batch_size=None,
        sampler=range(first, first + 2**40, every),
        num_workers=workers,
        multiprocessing_context=context if workers else None,
        pin_memory=device.type == "cuda",
        persistent_workers=False,
        generator=torch.Generator(),  # else the loader draws its workers' seed from the caller's random numbers
    )
    try:
        for batch in loader if workers else prefetched(loader):
            if isinstance(batch, _Failure):
                raise batch.as_error()
            yield {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}
    finally:
        context.end_processes()


def is_dead_loader(error: Exception) -> bool:
    """Whether a loader process was ended from outside.

    torch raises that out of whatever the main thread does at that moment, as a plain RuntimeError.
    """
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


class _Recording:
    """Mixed into a way to start processes: it knows those that it started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[multiprocessing.process.BaseProcess] = []

    def Process(self, *args: Any, **settings: Any) -> multiprocessing.process.BaseProcess:  # noqa: N802 (its name)
        process = super().Process(*args, **settings)  # type: ignore[misc]  # of the context beside it
        self.started.append(process)
        return process

    def end_processes(self) -> None:
        """End those that still live: torch ends them with its iterator, and a kept traceback can keep that one."""
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()


def _recording_context() -> Any:
    """The way to start processes that was chosen for this one, else the system's usual one.

    `multiprocessing.get_context()` without a name would make that choice for the whole process, and another pack's
    `set_start_method` would then fail.
    """
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return type("RecordingContext", (_Recording, type(multiprocessing.get_context(method))), {})()


@dataclass(frozen=True)
class _Failure:
    """An exception on its way between processes."""

    index: int
    kind: str
    message: str
    told: bool  # a BadInput, whose message is a sentence already
    trace: str

    def as_error(self) -> Exception:
        if self.told:
            return BadInput(self.message)
        error = TrainingFailed(
            f"Batch {self.index} could not be read: {self.kind}: {' '.join(self.message.split())}; the checkpoints "
            "before it are kept."
        )
        error.__cause__ = RuntimeError(self.trace)
        return error


class _Carrying(Dataset):
    """Gives what its source gives; an exception as a value, for torch would wrap its message in a traceback."""

    def __init__(self, source: BatchSource):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any] | _Failure:
        try:
            return self.source[index]
        except Exception as error:
            kind = type(error).__name__
            return _Failure(index, kind, str(error), isinstance(error, BadInput), traceback.format_exc())
