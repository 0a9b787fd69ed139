"""Parts of tensors read out of safetensors files."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

__all__ = ["DTYPES", "TensorFiles", "offsets_of"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_OPEN = 64  # files: a dataset has hundreds, and a process may open about a thousand in all
_MOST_HEADER = 100 << 20  # bytes; the format's own limit


class TensorFiles:
    """The files of one folder, read by place. Few are open at once, and none is mapped, so that what a process holds
    does not grow with what it has read. Threads take turns; a fork opens its own.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._begin()

    def _begin(self) -> None:
        self._open: OrderedDict[str, FileIO] = OrderedDict()
        self._offsets: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()

    def read(
        self,
        name: str,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        part: tuple[int, int, int, int] | None = None,
    ) -> Tensor:
        """The tensor that begins at byte `offset`, as float32 [...].

        part: (top, left, height, width) of its last two dimensions; other rows are not read from the disk.

        Raises OSError or ValueError where the file is gone or ends before the tensor does.
        """
        *planes, high, wide = shape if len(shape) > 1 else (1, *shape)
        top, left, height, width = part or (0, 0, high, wide)
        count, size = math.prod(planes), dtype.itemsize
        # one piece where the rows of all planes follow each other
        pieces = [(offset, count * high)] if height == high else [
            (offset + (plane * high + top) * wide * size, height) for plane in range(count)
        ]  # fmt: skip
        content = bytearray(sum(rows for _, rows in pieces) * wide * size)
        self._fill(memoryview(content), name, [(place, rows * wide * size) for place, rows in pieces])
        tensor = torch.frombuffer(content, dtype=dtype).reshape(*planes, height, wide)
        tensor = tensor[..., left : left + width].float().contiguous()
        return tensor if len(shape) > 1 else tensor.flatten()

    def offset(self, name: str, tensor: str) -> int:
        """Where a tensor begins in a file, by its header. KeyError where it holds none of that name."""
        self._own()
        if name not in self._offsets:
            with open(self.folder / name, "rb") as file:
                self._offsets[name] = offsets_of(file)
        return self._offsets[name][tensor]

    def close(self) -> None:
        """Let go of the files, so that Windows can delete them; reading again opens them again."""
        self._own()
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _own(self) -> None:
        if self._process != os.getpid():  # a forked loader worker must not move its parent's places in the files
            self._begin()

    def _fill(self, content: memoryview, name: str, pieces: list[tuple[int, int]]) -> None:
        self._own()
        with self._lock:
            file = self._file(name)
            start = 0
            for place, length in pieces:
                file.seek(place)
                if file.readinto(content[start : start + length]) != length:
                    raise ValueError(f"it ends before byte {place + length}")
                start += length

    def _file(self, name: str) -> FileIO:
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            file = self._open[name] = open(self.folder / name, "rb", buffering=0)  # noqa: SIM115 (stays open)
            if file.read(9)[8:] != b"{":  # of its header, which is not needed here
                raise ValueError("its header is damaged")
        self._open.move_to_end(name)
        return self._open[name]

    def __getstate__(self) -> dict:
        return {"folder": self.folder}

    def __setstate__(self, state: dict) -> None:
        self.folder = state["folder"]
        self._begin()


def offsets_of(file: BinaryIO | FileIO) -> dict[str, int]:
    """Where each tensor of a safetensors file begins, in bytes from the file's start. ValueError for another file."""
    length = int.from_bytes(file.read(8), "little")
    if length > _MOST_HEADER:
        raise ValueError("its header is damaged")
    try:
        header = json.loads(file.read(length))
        return {name: 8 + length + int(entry["data_offsets"][0]) for name, entry in header.items() if name[:2] != "__"}
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError("its header is damaged") from error
