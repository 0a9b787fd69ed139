"""A start reads no shard through that was found whole before; one that changed since is read, and named if damaged."""

import os
import time
from pathlib import Path

import pytest

from training.data.shards import RefinerDataset
from training.data.verified import CACHE
from training.errors import BadInput

SHARDS = ["shard-00000.safetensors", "shard-00001.safetensors", "pairs.safetensors"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(build):
    """Two shards and the table, found whole long enough after they were written."""
    folder = build([(4, 4)] * 4, shard_rows=2)
    time.sleep(2.1)  # what was written this moment could be written again in it, and would look the same
    assert RefinerDataset.open(folder).verify() == SHARDS
    return folder


def flip(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])


def test_what_was_found_whole_is_read_again_only_in_full_or_where_it_changed(folder, cache, tmp_path):
    data = RefinerDataset.open(folder)
    assert data.verify() == [] and data.verify(full=True) == SHARDS
    state = (folder / SHARDS[1]).stat()
    flip(folder / SHARDS[1])
    os.utime(folder / SHARDS[1], ns=(state.st_atime_ns, state.st_mtime_ns))  # as rsync and archives do
    with pytest.raises(BadInput, match=rf"{SHARDS[1]} .* is damaged"):
        data.verify()
    flip(folder / SHARDS[1])
    assert data.verify() == [SHARDS[1]]
    copied = folder.rename(tmp_path / "elsewhere")
    assert RefinerDataset.open(copied).verify() == SHARDS
    assert sorted(path.name for path in copied.iterdir()) == ["index.json", *sorted(SHARDS)]


def test_what_was_written_a_moment_ago_is_read_again(build):
    folder = build([(4, 4)] * 2)
    data = RefinerDataset.open(folder)
    assert len(data.verify()) == 2 and len(data.verify()) == 2


def test_a_word_that_is_damaged_or_cannot_be_written_costs_a_reading(folder, cache, monkeypatch):
    (word,) = (cache / "verified").iterdir()
    data = RefinerDataset.open(folder)
    for content in (b"", b"[1]", b'{"shard-00000.safetensors": 3}', b"\xff"):
        word.write_bytes(content)
        assert data.verify() == SHARDS and data.verify() == []
    monkeypatch.setenv(CACHE, str(folder / "index.json"))
    assert data.verify() == SHARDS == data.verify()
