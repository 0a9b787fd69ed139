"""Datasets as they were written before version 2 of the format, so that they go on being read."""

import hashlib
from pathlib import Path

import safetensors.torch

from training.data.index import FORMAT, content_hash, index_text
from training.data.shards import RefinerDataset

FIELDS = ("source", "sha256", "group", "split", "flip", "caption", "height", "width")
PAIRS_A_SHARD = 3


def as_version_1(written: Path, folder: Path) -> Path:
    """The pairs of a dataset of stills without masks and subsets, in `folder` and version 1."""
    data, shards, pairs = RefinerDataset.open(written), [], []
    folder.mkdir()

    def write(name: str, tensors: dict) -> None:
        content = safetensors.torch.save(tensors)
        (folder / name).write_bytes(content)
        shards.append({"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    if empty := data.empty_context():
        write("context-empty.safetensors", empty)
    for start in range(0, len(data.pairs), PAIRS_A_SHARD):
        name, rows = f"shard-{start // PAIRS_A_SHARD:05d}.safetensors", {}
        for row, pair in enumerate(data.pairs[start : start + PAIRS_A_SHARD]):
            rows |= {f"{row:06d}.{kind}": tensor for kind, tensor in data.read(start + row).items()}
            pairs.append({"shard": name, "row": row, **{field: getattr(pair, field) for field in FIELDS}})
        write(name, rows)
    same = ("latent", "vae", "base", "context", "residual_rms", "preview", "splits")
    index = {"format": FORMAT, "version": 1, **{name: data.info[name] for name in same}}
    index |= {"empty": {"shard": shards[0]["name"]} if empty else None, "shards": shards, "pairs": pairs}
    index["content_hash"] = content_hash(index)
    (folder / "index.json").write_text(index_text(index))
    return folder
