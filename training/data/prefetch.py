"""The next batches are read while the current step computes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")
_LOOK_EVERY = 0.1  # seconds between two looks at whether the reader has gone


@dataclass
class _Failed:
    error: BaseException


def prefetched(items: Iterable[T], ahead: int = 2) -> Iterator[T]:
    """The items in their order, up to `ahead` of them made beforehand in a thread.

    What `items` raises is raised here, in its turn. The thread ends with the iterator: at its end, when it is closed,
    and when nobody holds it any more.
    """
    queue: Queue[tuple[T] | _Failed | None] = Queue(ahead)
    gone = threading.Event()

    def put(entry: tuple[T] | _Failed | None) -> bool:
        while not gone.is_set():
            try:
                queue.put(entry, timeout=_LOOK_EVERY)
                return True
            except Full:
                continue
        return False

    def fill() -> None:
        try:
            for item in items:
                if not put((item,)):
                    return
            put(None)
        except BaseException as error:  # also what is no Exception: it belongs to the reader, not to this thread
            put(_Failed(error))

    thread = threading.Thread(target=fill, name="ref2v-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            try:
                entry = queue.get(timeout=_LOOK_EVERY)
            except Empty:
                continue
            if entry is None:
                return
            if isinstance(entry, _Failed):
                raise entry.error
            yield entry[0]
    finally:
        gone.set()
        thread.join()
