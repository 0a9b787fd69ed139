"""The order of a run: all of it follows from the seed and the absolute index."""

import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from training.data.batches import BatchSource, crop_size, plan_epoch
from training.data.index import Pair
from training.errors import BadInput

PIXELS = {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}


def pairs_of(sizes):
    return [Pair("s", i, h, w, "train", f"{i}.png", "0", f"{i}", False, "") for i, (h, w) in enumerate(sizes)]


def plan(sizes, **options):
    pairs = pairs_of(sizes)
    given = {"batch_size": 4, "repeats": 1, "seed": 0, "epoch": 0, "crop": None}
    return plan_epoch(pairs, range(len(pairs)), **(given | options))


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) if torch.is_tensor(first[name]) else first[name] == second[name]
        for name in first
    )


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(4, 7), st.integers(4, 7)), min_size=1, max_size=30),
    batch_size=st.integers(1, 6),
    repeats=st.integers(1, 3),
    crop=st.sampled_from([None, 4, 5, 6]),
)
def test_every_pair_is_shown_no_batch_is_short_and_sizes_agree(sizes, batch_size, repeats, crop):
    batches = plan(sizes, batch_size=batch_size, repeats=repeats, crop=crop)
    pairs = pairs_of(sizes)
    shown = Counter(i for batch in batches for i in batch)
    assert set(shown) == set(range(len(sizes))) and min(shown.values()) >= repeats
    assert {len(batch) for batch in batches} == {batch_size}
    assert all(len({crop_size(pairs[i], crop) for i in batch}) == 1 for batch in batches)
    buckets = len({crop_size(pair, crop) for pair in pairs})
    assert len(batches) * batch_size < len(sizes) * repeats + buckets * batch_size  # nothing filled without need


def test_a_crop_that_fits_everywhere_lets_all_sizes_mix():
    mixed = plan([(8, 8), (9, 9)] * 8, crop=8)
    assert any(len({i % 2 for i in batch}) == 2 for batch in mixed)
    assert all(len({i % 2 for i in batch}) == 1 for batch in plan([(8, 8), (9, 9)] * 8))


def test_epochs_and_seeds_have_their_own_order_and_the_same_length():
    sizes = [(8, 8)] * 13 + [(8, 9)] * 3
    first = plan(sizes)
    assert plan(sizes) == first
    for other in (plan(sizes, epoch=1), plan(sizes, seed=1)):
        assert other != first and len(other) == len(first)


OPTIONS = {"batch_size": 3, "repeats": 2, "seed": 7, "crop": 4, "caption_dropout": 0.4}
SIZES = [(5, 6), (6, 5), (4, 9), (8, 8), (5, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_taken_up_in_the_middle_sees_the_same_batches(build, workers):
    source = BatchSource(build(SIZES, with_text=True), **OPTIONS)
    whole = [source[k] for k in range(3 * source.per_epoch)]
    for start in (0, 1, source.per_epoch + 1):
        sampler = range(start, len(whole))
        loader = DataLoader(source, batch_size=None, sampler=sampler, num_workers=workers)
        resumed = list(loader)
        assert [batch["index"] for batch in resumed] == list(sampler)
        assert all(same(batch, whole[batch["index"]]) for batch in resumed)


def test_batches_do_not_depend_on_the_order_of_asking_or_the_process(build):
    source = BatchSource(build(SIZES, with_text=True), **OPTIONS)
    backwards = {k: source[k] for k in reversed(range(2 * source.per_epoch))}
    copy = pickle.loads(pickle.dumps(source))
    assert all(same(copy[k], backwards[k]) for k in backwards)


def test_a_batch_has_the_shapes_that_the_network_takes(build):
    source = BatchSource(build(SIZES, with_text=True), **OPTIONS)
    batch = source[0]
    assert batch["z"].shape == batch["b"].shape == (3, 4, 4, 4)
    assert batch["context"].shape == (3, 5, 6) and batch["pooled"].shape == (3, 7)
    assert batch["time_ids"].tolist() == [[32, 32, 0, 0, 32, 32]] * 3
    assert len(source) == source.per_epoch == 3  # 4 pairs twice, by threes


def test_without_text_a_batch_has_none(build):
    source = BatchSource(build([(4, 6)] * 3), batch_size=2, caption_dropout=0.1)
    assert set(source[0]) == {"z", "b", "time_ids", "index"}
    assert source[0]["time_ids"][0].tolist() == [32, 48, 0, 0, 32, 48]


def test_crops_wander_and_cut_target_and_base_alike(tmp_path):
    from training.data.shards import DatasetWriter

    places = torch.arange(12 * 12.0).reshape(1, 12, 12).expand(4, -1, -1)
    latent = {"name": "SD15", "channels": 4, "scale": 1.0, "shift": 0.0, "downscale": 8}
    with DatasetWriter(tmp_path / "data", latent=latent, vae=None, base={"kind": "latents"}) as writer:
        writer.add(places, places + 1000, source="a", sha256="0", group="a", split="train")
    source = BatchSource(tmp_path / "data", batch_size=2, crop=8)
    corners = set()
    for k in range(200):
        batch = source[k]
        assert torch.equal(batch["b"] - batch["z"], torch.full_like(batch["z"], 1000.0))
        corners |= {divmod(int(z[0, 0, 0]), 12) for z in batch["z"]}
    assert corners == {(top, left) for top in range(5) for left in range(5)}


def test_dropped_captions_become_the_empty_one_as_often_as_asked(build):
    source = BatchSource(build([(4, 4)] * 5, with_text=True), batch_size=4, caption_dropout=0.25)
    empty, dropped, total = source.empty, 0, 0
    for k in range(200):
        batch = source[k]
        gone = [torch.equal(context, empty["context"]) for context in batch["context"]]
        assert gone == [torch.equal(pooled, empty["pooled"]) for pooled in batch["pooled"]]
        dropped, total = dropped + sum(gone), total + len(gone)
    assert 0.20 < dropped / total < 0.30
    never = BatchSource(source.data.folder, batch_size=4)
    assert not any(torch.equal(context, empty["context"]) for k in range(20) for context in never[k]["context"])


def test_turning_on_dropout_or_flip_does_not_move_the_crops(build):
    folder = build([(9, 9)] * 4, latent=PIXELS)
    plain, flipped = (BatchSource(folder, batch_size=2, crop=5, flip=flip) for flip in (False, True))
    mirrored = 0
    for k in range(20):
        for straight, other in zip(plain[k]["z"], flipped[k]["z"], strict=True):
            mirrored += torch.equal(straight.flip(-1), other)
            assert torch.equal(straight, other) or torch.equal(straight.flip(-1), other)
    assert 10 <= mirrored <= 30


def test_latents_are_not_mirrored(build):
    with pytest.raises(BadInput, match="flip works on pixels only"):
        BatchSource(build([(4, 4)] * 2), batch_size=1, flip=True)


def test_caption_dropout_needs_the_empty_caption(tmp_path):
    from training.data.shards import DatasetWriter

    context = {"tokens": 2, "dim": 3, "pooled": 0, "fingerprint": "x"}
    latent = {"name": "SD15", "channels": 4, "scale": 1.0, "shift": 0.0, "downscale": 8}
    with DatasetWriter(tmp_path / "d", latent=latent, vae=None, base={"kind": "x"}, context=context) as writer:
        z, text = torch.ones(4, 4, 4), torch.ones(2, 3)
        writer.add(z, 2 * z, source="a", sha256="0", group="a", split="train", context=text)
    assert BatchSource(tmp_path / "d", batch_size=1)[0]["context"].shape == (1, 2, 3)
    with pytest.raises(BadInput, match="caption_dropout needs the encoded empty caption"):
        BatchSource(tmp_path / "d", batch_size=1, caption_dropout=0.1)


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"repeats": 0}, {"crop": 0}, {"caption_dropout": 1.5}])
def test_an_option_out_of_range_is_named(build, option):
    with pytest.raises(BadInput, match=next(iter(option))):
        BatchSource(build([(4, 4)] * 2), **({"batch_size": 1} | option))
