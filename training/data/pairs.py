"""What is known of each pair, as columns: any number of pairs opens at once and takes no Python object each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np

from ..errors import BadInput

__all__ = ["SPLITS", "Pair", "PairTable", "TextColumn"]

SPLITS = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class Pair:
    """One target latent z with its base latent b: where it lies, and where it came from.

    `height` and `width` are latent cells, `base_height` and `base_width` those at which the base was made (0: the
    same). `source` is relative to the picture folder and `sha256` is that file's. Pairs of one `group` (siblings of one
    picture) are all on the same side of the split. `frames` is 1 for a still; `masked` says whether it has a mask.
    """

    shard: str
    row: int
    height: int
    width: int
    split: str
    source: str
    sha256: str
    group: str
    flip: bool
    caption: str
    frames: int = 1
    subset: str = ""
    base_height: int = 0
    base_width: int = 0
    masked: bool = False


class TextColumn(Sequence[str]):
    """Texts as one array of bytes and the places where each ends."""

    def __init__(self, content: np.ndarray, ends: np.ndarray):
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextColumn:
        # A file name need not be valid Unicode: what Python made of its bytes is kept as it is.
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:  # type: ignore[override]
        if not 0 <= i < len(self.ends):
            raise IndexError(i)
        start = int(self.ends[i - 1]) if i else 0
        return self.content[start : int(self.ends[i])].tobytes().decode("utf-8", "surrogatepass")


PAIR_NUMBERS = {
    "shard": np.int32, "row": np.int32, "frames": np.int32, "height": np.int32, "width": np.int32,
    "base_height": np.int32, "base_width": np.int32, "subset": np.int32, "caption": np.int32, "held_out": np.uint8,
    "flip": np.uint8, "z": np.int64, "b": np.int64, "mask": np.int64,
}
"""Columns of numbers, one row a pair. shard: its place among the index's shards; subset and caption likewise. z, b,
mask: the byte of the shard where the tensor begins, -1 without a mask."""

CAPTION_NUMBERS = {"text_shard": np.int32, "context": np.int64, "pooled": np.int64}
"""Columns of numbers, one row a caption. context, pooled: as z; -1 where the dataset has no text, or no pooled one."""

PAIR_TEXTS = ("source", "sha256", "group")


class PairTable(Sequence[Pair]):
    """All pairs of a dataset. One of them, as `table[i]`, is made when it is asked for.

    numbers: the columns of PAIR_NUMBERS; captions: those of CAPTION_NUMBERS and the captions themselves. In version 1,
    whose tensors are found by their names, `z` is None.
    """

    def __init__(
        self,
        numbers: dict[str, np.ndarray],
        texts: dict[str, TextColumn],
        captions: TextColumn,
        caption_numbers: dict[str, np.ndarray],
        shards: list[str],
        subsets: dict[str, float],
    ):
        self.numbers, self.texts = numbers, texts
        self.captions, self.caption_numbers = captions, caption_numbers
        self.shards = shards
        self.subsets = {"": 1.0, **subsets}
        self._subset_names = list(self.subsets)

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> PairTable:
        """The columns of single pairs, whose tensors are found by their names. A table is given back as it is."""
        if isinstance(pairs, PairTable):
            return pairs
        pairs = list(pairs)
        shards, captions, subsets = (
            list(dict.fromkeys(getattr(pair, name) for pair in pairs)) for name in ("shard", "caption", "subset")
        )
        subsets = ["", *(name for name in subsets if name)]
        columns = {"shard": shards, "caption": captions, "subset": subsets}
        place = {name: {value: i for i, value in enumerate(values)} for name, values in columns.items()}
        numbers = {}
        for name, dtype in PAIR_NUMBERS.items():
            if name in place:
                column = [place[name][getattr(pair, name)] for pair in pairs]
            elif name == "held_out":
                column = [pair.split == "held_out" for pair in pairs]
            elif name in ("z", "b", "mask"):
                column = [-1] * len(pairs)
            else:
                column = [getattr(pair, name) for pair in pairs]
            numbers[name] = np.array(column, dtype=dtype)
        texts = {name: TextColumn.of(getattr(pair, name) for pair in pairs) for name in PAIR_TEXTS}
        return cls(numbers, texts, TextColumn.of(captions), {}, shards, dict.fromkeys(subsets[1:], 1.0))

    def __len__(self) -> int:
        return len(self.numbers["row"])

    @overload
    def __getitem__(self, i: int) -> Pair: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Pair, ...]: ...
    def __getitem__(self, i):
        if isinstance(i, slice):
            return tuple(self[k] for k in range(*i.indices(len(self))))
        i = range(len(self))[i]  # negative ones, and an IndexError beyond the end
        number: dict[str, Any] = {name: int(column[i]) for name, column in self.numbers.items()}
        return Pair(
            shard=self.shards[number["shard"]],
            split=SPLITS[number["held_out"]],
            flip=bool(number["flip"]),
            caption=self.captions[number["caption"]],
            subset=self._subset_names[number["subset"]],
            masked=number["mask"] >= 0,
            **{name: self.texts[name][i] for name in PAIR_TEXTS},  # type: ignore[arg-type]
            **{name: number[name] for name in ("row", "height", "width", "frames", "base_height", "base_width")},
        )

    def __iter__(self) -> Iterator[Pair]:
        return (self[i] for i in range(len(self)))

    def sizes(self, indices: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """(frames, height, width) of the pairs `indices`, or of all. int64 [n, 3]"""
        columns = np.stack([self.numbers[name] for name in ("frames", "height", "width")], axis=1).astype(np.int64)
        return columns if indices is None else columns[np.asarray(indices, dtype=np.int64)]

    def weights(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """How often an epoch draws each of the pairs `indices`. float64 [n]"""
        per_subset = np.array(list(self.subsets.values()))
        return per_subset[self.numbers["subset"][np.asarray(indices, dtype=np.int64)]]

    # ---- as a file -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, np.ndarray]:
        """For pairs.safetensors."""
        found = {**self.numbers, **{f"caption.{name}": column for name, column in self.caption_numbers.items()}}
        for name, column in (*self.texts.items(), ("caption.text", self.captions)):
            found[f"{name}.bytes"], found[f"{name}.ends"] = column.content, column.ends
        return found

    @classmethod
    def of_tensors(cls, found: dict[str, np.ndarray], shards: list[str], subsets: dict[str, float]) -> PairTable:
        """The inverse of `tensors`. KeyError or ValueError where a column is missing or does not fit."""
        numbers = {name: _column(found, name, dtype) for name, dtype in PAIR_NUMBERS.items()}
        captions = {name: _column(found, f"caption.{name}", dtype) for name, dtype in CAPTION_NUMBERS.items()}
        texts = {name: _texts(found, name) for name in PAIR_TEXTS}
        table = cls(numbers, texts, _texts(found, "caption.text"), captions, shards, subsets)
        table._check()
        return table

    def _check(self) -> None:
        """ValueError where columns differ in length or a number leads nowhere."""
        pairs, captions = len(self), len(self.captions)
        lengths = {len(column) for column in self.numbers.values()} | {len(texts) for texts in self.texts.values()}
        if lengths != {pairs} or {len(column) for column in self.caption_numbers.values()} != {captions}:
            raise ValueError("its columns differ in length")
        limits = {
            "shard": len(self.shards), "subset": len(self.subsets), "caption": captions, "held_out": 2, "flip": 2,
        }  # fmt: skip
        for name, column in self.numbers.items():
            least = {"mask": -1, "frames": 1, "height": 1, "width": 1}.get(name, 0)
            if pairs and (column.min() < least or column.max() >= limits.get(name, 2**62)):
                raise ValueError(f"its column {name} holds {column.min()} to {column.max()}")
        places = self.caption_numbers["text_shard"]
        if captions and (places.min() < -1 or places.max() >= len(self.shards)):
            raise ValueError("a caption's text lies in no shard")


def pair_of(entry: dict[str, Any]) -> Pair:
    """A pair as version 1 has it in index.json. KeyError where a field is missing."""
    return Pair(**{field.name: entry[field.name] for field in fields(Pair)[:10]})


def check_subsets(subsets: dict[str, float]) -> dict[str, float]:
    """BadInput unless these are names with weights that can be."""
    for name, weight in subsets.items():
        if not isinstance(name, str) or not name:
            raise BadInput(f"A subset must have a name, not {name!r}.")
        if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= 1000:
            raise BadInput(f"The weight of the subset {name!r} must be a number above 0, 1000 at most, not {weight!r}.")
    return {name: float(weight) for name, weight in subsets.items()}


def _column(found: dict[str, np.ndarray], name: str, dtype: Any) -> np.ndarray:
    column = found[name]
    if column.dtype != dtype or column.ndim != 1:
        raise ValueError(f"its column {name} is {column.dtype} {list(column.shape)}")
    return column


def _texts(found: dict[str, np.ndarray], name: str) -> TextColumn:
    content, ends = _column(found, f"{name}.bytes", np.uint8), _column(found, f"{name}.ends", np.int64)
    if len(ends) and (np.diff(ends, prepend=0).min() < 0 or ends[-1] != len(content)):
        raise ValueError(f"the texts of its column {name} overlap")
    return TextColumn(content, ends)
