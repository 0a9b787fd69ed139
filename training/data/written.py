"""What a build has brought to the disk so far, and how a later one goes on with it after a kill."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..storage.staged_folder import PROGRESS, StagedFolder
from .index import check_shard
from .pairs import CAPTION_NUMBERS, PAIR_NUMBERS, PAIR_TEXTS, SPLITS, PairTable, TextColumn
from .statistics import PreviewFit, ResidualMeter
from .tensor_files import offsets_of

__all__ = ["Shard", "Written"]


@dataclass(frozen=True)
class Shard:
    """One finished file."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, name: str, data: builtins.bytes) -> Shard:
        return cls(name, len(data), hashlib.sha256(data).hexdigest())

    def entry(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Written:
    """Pairs, captions and shards of a dataset in the making.

    After each shard a small hidden file says what it added; a writer of the same `recipe` reads them in their order and
    goes on behind the last. Rows are kept as lists of plain values: those of the shard in the making at the end.
    """

    stage: StagedFolder
    recipe: str
    meters: tuple[ResidualMeter, PreviewFit | None]
    shards: list[Shard] = field(default_factory=list)
    resumed: int = 0  # of the shards
    flushes: int = 0
    pairs: list[dict[str, Any]] = field(default_factory=list)
    captions: list[dict[str, Any]] = field(default_factory=list)
    splits: dict[str, dict[str, int]] = field(default_factory=lambda: {s: {"pairs": 0, "bytes": 0} for s in SPLITS})
    split_of_group: dict[str, str] = field(default_factory=dict)
    caption_of_text: dict[str, int] = field(default_factory=dict)  # the first of each text
    caption_of_tensors: dict[str, int] = field(default_factory=dict)
    on_disk: tuple[int, int] = (0, 0)  # of the pairs and captions

    def add_pair(self, *, size: int, split: str, **known: Any) -> None:
        """A pair of the shard in the making. size: its bytes."""
        self._count({**known, "split": split, "size": size})

    def caption(self, caption: str, text: dict[str, Tensor], row: int) -> tuple[int, bool]:
        """(the number of a caption with these tensors, whether it is new); without tensors the first of that text."""
        if not text and caption in self.caption_of_text:
            return self.caption_of_text[caption], False
        digest = hashlib.sha256(caption.encode("utf-8", "surrogatepass"))
        for name, tensor in sorted(text.items()):
            digest.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
        key = digest.hexdigest()
        if key in self.caption_of_tensors:
            return self.caption_of_tensors[key], False
        self._name({"text": caption, "key": key, "row": row if text else -1})
        return len(self.captions) - 1, True

    def write(self, files: dict[str, bytes]) -> None:
        """Bring shards to the disk, and then the word that they are there."""
        for name, data in files.items():
            self.stage.write(name, data)
            self._place(name, data)
        state: dict[str, Any] = {
            "recipe": self.recipe, "shards": [Shard.of(name, data).entry() for name, data in files.items()],
            "pairs": self.pairs[self.on_disk[0] :], "captions": self.captions[self.on_disk[1] :],
            "meters": [meter and meter.state() for meter in self.meters],
        }  # fmt: skip
        self.shards += [Shard(**entry) for entry in state["shards"]]
        self.stage.write(f"{PROGRESS}{self.flushes:05d}", json.dumps(state).encode())
        self.on_disk = len(self.pairs), len(self.captions)
        self.flushes += 1

    def resume(self) -> int:
        """Go on behind what a killed build has finished, and remove what it has not. Returns how many pairs."""
        for state in self._finished():
            self.shards += [Shard(**entry) for entry in state["shards"]]
            for caption in state["captions"]:
                self._name(caption)
            for pair in state["pairs"]:
                self._count(pair)
            for meter, numbers in zip(self.meters, state["meters"], strict=True):
                if meter is not None:
                    meter.restore(numbers)
            self.flushes += 1
        self.resumed = len(self.shards)
        self.on_disk = len(self.pairs), len(self.captions)
        files = {shard.name for shard in self.shards} | {f"{PROGRESS}{i:05d}" for i in range(self.flushes)}
        self.stage.remove_but(files)
        return len(self.pairs)

    def clear(self) -> None:
        """Remove the hidden files: the dataset is whole."""
        self.stage.remove_but({path.name for path in self.stage.path.iterdir() if not path.name.startswith(PROGRESS)})

    def table(self, subsets: dict[str, float]) -> PairTable:
        """The columns of all pairs, all of whose shards are on the disk."""
        names = [shard.name for shard in self.shards]
        place = {name: i for i, name in enumerate(names)}

        def column(rows: list[dict[str, Any]], name: str, dtype: Any) -> np.ndarray:
            return np.fromiter((row[name] for row in rows), dtype=dtype, count=len(rows))

        for pair in self.pairs:
            pair["shard"], pair["held_out"] = place[pair["file"]], pair["split"] == "held_out"
        for caption in self.captions:
            caption["text_shard"] = place.get(caption["file"], -1)
        return PairTable(
            {name: column(self.pairs, name, dtype) for name, dtype in PAIR_NUMBERS.items()},
            {name: TextColumn.of(pair[name] for pair in self.pairs) for name in PAIR_TEXTS},
            TextColumn.of(caption["text"] for caption in self.captions),
            {name: column(self.captions, name, dtype) for name, dtype in CAPTION_NUMBERS.items()},
            names,
            subsets,
        )

    def _count(self, pair: dict[str, Any]) -> None:
        self.pairs.append(pair)
        self.split_of_group[pair["group"]] = pair["split"]
        self.splits[pair["split"]]["pairs"] += 1
        self.splits[pair["split"]]["bytes"] += pair["size"]

    def _name(self, caption: dict[str, Any]) -> None:
        self.captions.append({"file": "", "context": -1, "pooled": -1, **caption})
        self.caption_of_tensors[caption["key"]] = len(self.captions) - 1
        self.caption_of_text.setdefault(caption["text"], len(self.captions) - 1)

    def _place(self, name: str, data: bytes) -> None:
        """Where in the new file its rows' tensors begin."""
        offsets = offsets_of(io.BytesIO(data))
        of_pairs = name.startswith("shard")
        rows, kinds = (self.pairs, ("z", "b", "mask")) if of_pairs else (self.captions, ("context", "pooled"))
        for entry in rows[self.on_disk[0 if of_pairs else 1] :]:
            entry["file"] = name
            for kind in kinds:
                entry[kind] = offsets.get(f"{entry['row']:06d}.{kind}", -1)

    def _finished(self) -> Iterable[dict[str, Any]]:
        """What the hidden files say, up to the first that is damaged, of another recipe, or whose shards are gone."""
        number = 0
        while True:
            try:
                state = json.loads((self.stage.path / f"{PROGRESS}{number:05d}").read_bytes())
                if state["recipe"] != self.recipe:
                    return
                for shard in state["shards"]:
                    check_shard(self.stage.path, shard["name"], shard["bytes"], None)
            except (OSError, ValueError, KeyError, TypeError, BadInput):
                return
            yield state
            number += 1
