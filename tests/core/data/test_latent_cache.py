"""Latents are found again for the very same pixels, size, VAE and dtype, and for nothing else."""

import os

import pytest
import torch

from training.data.latent_cache import LatentCache

VAE, SAME_VAE_IN_BF16 = "a" * 64, "b" * 64


@pytest.fixture
def picture():
    return torch.rand(3, 16, 24)


@pytest.fixture
def latent():
    return torch.randn(4, 2, 3)


@pytest.fixture
def cache(tmp_path, picture, latent):
    made = LatentCache(tmp_path, VAE)
    made.keep(picture, latent)
    return made


def test_an_unchanged_picture_is_found(cache, picture, latent, tmp_path):
    again = LatentCache(tmp_path, VAE)
    assert torch.equal(again.find(picture.clone()), latent)
    assert (again.found, again.made) == (1, 0)


def test_each_change_is_a_miss(cache, picture, tmp_path):
    touched = picture.clone()
    touched[1, 5, 5] += 1 / 255
    assert cache.find(touched) is None
    assert cache.find(picture.reshape(3, 24, 16)) is None  # the same bytes at another resolution
    assert cache.find(picture[:, :, :16].contiguous()) is None
    assert LatentCache(tmp_path, SAME_VAE_IN_BF16).find(picture) is None
    assert cache.found == 0


@pytest.mark.parametrize("damage", ["cut", "flipped bit", "empty", "nonsense"])
def test_a_damaged_file_is_made_anew(cache, picture, latent, tmp_path, damage):
    (path,) = tmp_path.glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flipped bit":
        data[-1] ^= 1
    path.write_bytes({"cut": data[:-3], "empty": b"", "nonsense": b"x" * 200}.get(damage, data))
    assert cache.find(picture) is None
    cache.keep(picture, latent)
    assert torch.equal(cache.find(picture), latent)


def test_what_was_used_longest_ago_goes_first(tmp_path):
    pictures = [torch.full((3, 8, 8), value / 4) for value in range(4)]
    cache = LatentCache(tmp_path, VAE)
    for age, picture in enumerate(pictures):
        cache.keep(picture, torch.zeros(4, 1, 1))
        os.utime(cache._path(picture), ns=(10**9 * age, 10**9 * age))
    size = cache._path(pictures[0]).stat().st_size
    assert cache.find(pictures[0]) is not None  # used again, so it is the newest now
    cache.most_bytes = 2 * size
    assert cache.trim() == 2 * size
    assert [cache.find(picture) is not None for picture in pictures] == [True, False, False, True]


def test_a_disk_that_takes_nothing_is_said_and_stops_nothing(tmp_path, picture, latent):
    (tmp_path / "file").write_bytes(b"")
    cache = LatentCache(tmp_path / "file", VAE)  # a folder cannot be made there
    cache.keep(picture, latent)
    cache.keep(picture, latent)
    assert cache.failed and cache.made == 2 and cache.find(picture) is None


def test_a_write_that_fails_leaves_no_part(tmp_path, picture, latent, monkeypatch):
    cache = LatentCache(tmp_path, VAE)

    def broken(*_):
        raise OSError("no such luck")

    monkeypatch.setattr("training.data.latent_cache.os.replace", broken)
    cache.keep(picture, latent)
    assert "no such luck" in cache.failed and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_dataset_has_the_disk_first(tmp_path, picture, latent):
    cache = LatentCache(tmp_path, VAE)
    cache.reserve = 2**60
    cache.keep(picture, latent)
    assert "no room" in cache.failed and cache.find(picture) is None


def test_what_the_same_build_has_made_does_not_count_as_found(cache, picture, tmp_path):
    assert cache.find(picture) is not None and cache.found == 0
    again = LatentCache(tmp_path, VAE)
    assert all(again.find(picture) is not None for _ in range(3)) and again.found == 1
