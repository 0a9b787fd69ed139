"""Writing a dataset; training/data/shards.py says what lies where."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from einops import rearrange
from torch import Tensor

from ..errors import BadInput
from ..storage.staged_folder import StagedFolder
from .index import FORMAT, INDEX, TABLE, VERSION, check_latent, content_hash, index_text
from .pairs import SPLITS, check_subsets
from .statistics import PreviewFit, ResidualMeter
from .tensor_files import DTYPES
from .verified import remember_verified
from .written import Shard, Written

__all__ = ["SHARD_BYTES", "SHARD_ROWS", "DatasetWriter", "estimate_bytes"]

SHARD_BYTES = 256 * 2**20
SHARD_ROWS = 4096  # a shard of small pairs ends here: what is finished outlives a killed build
_NO_RESIDUAL = 1e-6  # model space is about +-1: this little is float32's rounding, as of flat pictures resized


def estimate_bytes(
    sizes: Sequence[tuple[int, int]],
    channels: int,
    context: dict | None = None,
    *,
    captions: int | None = None,
    dtype: str = "float32",
    masks: int = 0,
) -> int:
    """Bytes of tensors that pairs of these (height, width) latent cells will take on disk, headers left out.

    captions: how many different ones there are, None = each pair has its own; masks: how many pairs have one.
    """
    text = context["tokens"] * context["dim"] + context.get("pooled", 0) if context else 0
    cells = sum(height * width for height, width in sizes)
    texts = text * (len(sizes) if captions is None else captions)
    return DTYPES[dtype].itemsize * (2 * channels * cells + texts + masks * cells // max(len(sizes), 1))


class DatasetWriter:
    """Writes a dataset into a hidden sibling of `folder`, which takes its name only in `finish()`.

    As a context manager it finishes when the block ends well, and removes everything when it does not (errors,
    Ctrl-C and the host's interrupt alike). With `resume`, what was interrupted or killed leaves its finished shards for
    the next writer of the same recipe; a BadInput still removes everything, for it would come again.

    Args:
        folder: where the dataset will be; must not exist.
        latent: {"name", "channels", "scale", "shift", "downscale"}; model space = (raw - shift) * scale.
        vae: {"fingerprint", "dtype"}, or None in pixel space.
        base: {"kind": ..., ...}: where the base latents came from.
        context: {"tokens", "dim", "pooled", "fingerprint"}, or None without text.
        empty: the encoded empty caption, {"context": [T, D], "pooled": [P]}; needed for caption dropout.
        dtype: of latents, masks and text on the disk, one of "float32", "float16", "bfloat16".
        subsets: name -> weight, how often an epoch draws its pairs: 2 = twice, 0.5 = every second one.
        resume: plain JSON that names everything the pairs follow from, or None: what a killed build of the same recipe
            has finished is gone on with. `resumed` says how many pairs; they are not to be added again.
        shard_bytes: a shard is written out when its tensors reach this size (and so much memory is held).

    Raises:
        BadInput: the folder exists, a description does not fit, or the disk is full.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        latent: dict,
        vae: dict | None,
        base: dict,
        context: dict | None = None,
        empty: dict[str, Tensor] | None = None,
        dtype: str = "float32",
        subsets: dict[str, float] | None = None,
        resume: object = None,
        shard_bytes: int = SHARD_BYTES,
        shard_rows: int = SHARD_ROWS,
    ):
        check_latent(latent)
        if empty is not None and context is None:
            raise BadInput("The dataset has an empty caption but no context: give both or neither.")
        if dtype not in DTYPES:
            raise BadInput(f"The dataset's dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        self._subsets = check_subsets(subsets or {})
        self._index = {"format": FORMAT, "version": VERSION, "latent": latent, "vae": vae, "base": base, "dtype": dtype}
        self._index |= {"context": context, "empty": None, "subsets": self._subsets}
        try:
            index_text(self._index)
            recipe = json.dumps([self._index, resume], sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadInput(f"The description of the dataset must be plain JSON: {error}.") from error
        self._context, self._channels, self._dtype = context, latent["channels"], DTYPES[dtype]
        self._dtype_name = dtype
        self._shard_bytes, self._shard_rows = shard_bytes, shard_rows
        # In pixel space the latent is the picture already.
        pixels = self._channels == 3 and latent["downscale"] == 1
        self._meters = (ResidualMeter(), None if pixels else PreviewFit(self._channels))
        self._done: Path | None = None
        self._rows: dict[str, Tensor] = {}
        self._texts: dict[str, Tensor] = {}
        self._row = self._text_row = self._bytes = 0
        empty_text = self._check_text({**empty}, "the empty caption") if empty else {}
        self._stage = StagedFolder(Path(folder), resume=resume is not None)
        try:
            self._written = Written(self._stage, hashlib.sha256(recipe.encode()).hexdigest(), self._meters)
            self._keep = resume is not None
            self.resumed = self._written.resume() if self._keep else 0
            if empty_text:
                self._index["empty"] = self._caption_number("", empty_text)
        except BaseException:
            self._stage.discard()
            raise

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.finish()
        elif self._done is None:
            self._abandon(error)

    def add(
        self,
        z: Tensor,
        b: Tensor,
        *,
        source: str,
        sha256: str,
        group: str,
        split: str,
        caption: str = "",
        flip: bool = False,
        context: Tensor | None = None,
        pooled: Tensor | None = None,
        rgb: Tensor | None = None,
        mask: Tensor | None = None,
        subset: str = "",
        base_size: tuple[int, int] | None = None,
    ) -> None:
        """Add one pair.

        Args:
            z, b: target and base latent [C, h, w] in model space, or [F, C, h, w] of a clip; any float dtype.
            source: the picture's name, relative to its folder; with `sha256` of that file.
            group: siblings share it, and must share `split` ("train" or "held_out") too.
            context, pooled: [T, D] and [P]; needed when the dataset has them, but for a caption that was added before.
            rgb: the target picture [3, h, w] or [F, 3, h, w] in [-1, 1], area-averaged to latent size; feeds the
                preview fit.
            mask: how much a latent cell's loss counts, [h, w] or [1, h, w] (all frames) or [F, 1, h, w] in 0..1.
            subset: one of those that the writer was told of; "" has the weight 1.
            base_size: (height, width) in latent cells at which the base was made, where it was brought to z's grid.

        Raises:
            BadInput: a shape or number that does not fit, named by `source`; or the disk is full.
        """
        tensors = self._check_pair(z, b, mask, source)
        frames, _, height, width = tensors["z"].shape
        if split not in SPLITS:
            raise BadInput(f"{source}: the split must be one of {', '.join(SPLITS)}, not {split!r}.")
        if self._written.split_of_group.setdefault(group, split) != split:
            raise BadInput(f"{source}: its group {group!r} is in the other split already, and siblings must not part.")
        if subset and subset not in self._subsets:
            raise BadInput(f"{source}: its subset {subset!r} is none of {', '.join(self._subsets) or 'the dataset'}.")
        base_height, base_width = base_size or (0, 0)
        if base_size and min(base_size) < 1:
            raise BadInput(f"{source}: the size of its base must be at least 1 x 1 cells, not {list(base_size)}.")
        text = {}
        if self._context is not None and (context is not None or caption not in self._written.caption_of_text):
            text = self._check_text({"context": context, "pooled": pooled}, source)
        size = sum(tensor.nbytes for tensor in (*tensors.values(), *text.values()))
        if self._rows and (self._bytes + size > self._shard_bytes or self._row == self._shard_rows):
            self._flush()
        number = self._caption_number(caption, text)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self._bytes += size
        self._rows |= {f"{self._row:06d}.{name}": tensor for name, tensor in tensors.items()}
        self._written.add_pair(
            split=split, source=source, sha256=sha256, group=group, caption=number, row=self._row, frames=frames,
            height=height, width=width, base_height=base_height, base_width=base_width, flip=flip,
            subset=1 + list(self._subsets).index(subset) if subset else 0, size=size,
        )  # fmt: skip
        self._row += 1
        if split == "train":
            residual, preview = self._meters
            residual.add(tensors["z"], tensors["b"], tensors.get("mask"))
            if preview is not None and rgb is not None:
                shape = (3, height, width) if z.ndim == 3 else (frames, 3, height, width)
                picture = self._finite(rgb, shape, f"{source}: the preview picture")
                for frame, shown in zip(tensors["z"], picture.reshape(frames, 3, height, width), strict=True):
                    preview.add(frame, shown)

    def attach(self, name: str, data: bytes) -> None:
        """Put a further file (a contact sheet) beside the shards. The content hash does not cover it."""
        self._stage.write(name, data)

    def finish(self) -> Path:
        """Write what is left, and give the folder its name. Returns the folder; a second call does nothing more.

        Raises:
            BadInput: there is no training pair, every base equals its target, or the disk is full. Nothing is left.
        """
        if self._done is not None:
            return self._done
        try:
            self._done = self._finish()
        except BaseException as error:
            self._abandon(error)
            raise
        return self._done

    def _finish(self) -> Path:
        if not self._written.splits["train"]["pairs"]:
            raise BadInput(f"The dataset {self._stage.final} would have no training pair: give it more pictures.")
        residual, preview = self._meters
        rms = residual.rms()
        if rms < _NO_RESIDUAL:
            raise BadInput(
                f"Every base of the dataset {self._stage.final} equals its target, so there is nothing to learn: "
                "give it another base."
            )
        self._flush()
        table = safetensors.numpy.save(self._written.table(self._subsets).tensors())
        self._stage.write(TABLE, table)
        self._index |= {
            "residual_rms": rms,
            "preview": preview.solve() if preview is not None else None,
            "shards": [*(shard.entry() for shard in self._written.shards), Shard.of(TABLE, table).entry()],
            "splits": self._written.splits,
        }
        self._index["content_hash"] = content_hash(self._index)
        self._stage.write(INDEX, index_text(self._index).encode())
        self._written.clear()
        folder = self._stage.commit()
        # Those of a killed build were hashed before the kill, and are not known to have come through it.
        written = self._written.shards[self._written.resumed :]
        remember_verified(folder, [(shard.name, shard.sha256) for shard in written])
        return folder

    def _abandon(self, error: BaseException | None) -> None:
        if self._keep and not isinstance(error, BadInput) and self._written.shards:
            self._stage.leave()
        else:
            self._stage.discard()

    def _flush(self) -> None:
        """The pairs so far and the texts that they brought into a shard each."""
        data = {}
        if self._texts:
            data[f"text-{self._written.flushes:05d}.safetensors"] = self._texts
        if self._rows:
            data[f"shard-{self._written.flushes:05d}.safetensors"] = self._rows
        # Serialised in memory and written here: a full disk then is an OSError with its number, the bytes are synced
        # before the index speaks of them, and they need not be read back for their hash.
        self._written.write({name: safetensors.torch.save(tensors) for name, tensors in data.items()})
        self._rows, self._texts = {}, {}
        self._row = self._text_row = self._bytes = 0

    def _caption_number(self, caption: str, text: dict[str, Tensor]) -> int:
        """The number of a caption with this text; its tensors are kept for the next shard where they are new."""
        number, new = self._written.caption(caption, text, self._text_row)
        if new and text:
            self._texts |= {f"{self._text_row:06d}.{name}": tensor for name, tensor in text.items()}
            self._text_row += 1
            self._bytes += sum(tensor.nbytes for tensor in text.values())
        return number

    def _check_pair(self, z: Tensor, b: Tensor, mask: Tensor | None, source: str) -> dict[str, Tensor]:
        if z.ndim not in (3, 4) or z.shape[-3] != self._channels or min(z.shape) < 1:
            raise BadInput(
                f"{source}: the target latent must be [{self._channels}, height, width], not {list(z.shape)}."
            )
        if b.shape != z.shape:
            raise BadInput(f"{source}: the base latent is {list(b.shape)} and its target {list(z.shape)}.")
        tensors = {}
        for name, tensor, what in (("z", z, "target"), ("b", b, "base")):
            checked = self._finite(tensor, tuple(tensor.shape), f"{source}: the {what} latent")
            tensors[name] = checked if checked.ndim == 4 else rearrange(checked, "c h w -> 1 c h w")
        if mask is not None:
            tensors["mask"] = self._check_mask(mask, tensors["z"].shape, source)
        return tensors

    def _check_mask(self, mask: Tensor, latent: torch.Size, source: str) -> Tensor:
        frames, _, height, width = latent
        if tuple(mask.shape) in ((height, width), (1, height, width)):
            mask = mask.reshape(1, 1, height, width).expand(frames, -1, -1, -1)
        mask = self._finite(mask, (frames, 1, height, width), f"{source}: the mask")
        if mask.min() < 0 or mask.max() > 1:
            raise BadInput(f"{source}: the mask must lie in 0..1, not in {mask.min():g}..{mask.max():g}.")
        if not mask.any():
            raise BadInput(f"{source}: the mask is 0 everywhere, so nothing of the picture would be learnt.")
        return mask

    def _check_text(self, text: dict[str, Tensor | None], source: str) -> dict[str, Tensor]:
        context: dict[str, Any] = self._context or {}
        shapes: dict[str, tuple[int, ...]] = {"context": (context["tokens"], context["dim"])}
        if context.get("pooled"):
            shapes["pooled"] = (context["pooled"],)
        checked = {}
        for name, shape in shapes.items():
            tensor = text.get(name)
            if tensor is None:
                raise BadInput(f"{source}: the dataset has text, so {name} {list(shape)} is needed.")
            checked[name] = self._finite(tensor, shape, f"{source}: {name}")
        return checked

    def _finite(self, tensor: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
        """`tensor` as it is written, on the CPU; BadInput when its shape differs or it holds NaN or infinity."""
        if tuple(tensor.shape) != shape:
            raise BadInput(f"{what} must be {list(shape)}, not {list(tensor.shape)}.")
        # A copy always: the caller may go on to use the same memory (a flip, the next picture) before it is written.
        tensor = tensor.detach().to("cpu", self._dtype, copy=True, memory_format=torch.contiguous_format)
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            where = "" if self._dtype == torch.float32 else f" in {self._dtype_name}"
            raise BadInput(f"{what} has {bad} of {tensor.numel()} values that are NaN or infinite{where}.")
        return tensor
