"""The order of batches in version 2: sizes that share, weights, steps of like sizes, no pair twice without need."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.data.test_batches import pairs_of
from tests.core.data.version_1 import as_version_1
from training.data.batches import BatchSource
from training.data.buckets import merge_sizes
from training.data.order import BatchOrder, shown_sizes
from training.data.pairs import PairTable
from training.data.shards import DatasetWriter, RefinerDataset
from training.errors import BadInput

SD15 = {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8}
# 30 pictures as a person cut them: 22 sizes, in cells of an SD1.5 latent
BY_HAND = [
    (96, 64), (88, 64), (64, 96), (72, 72), (80, 72), (96, 56), (56, 96), (64, 64), (72, 64), (88, 56), (64, 88),
    (80, 64), (96, 64), (72, 80), (64, 72), (88, 64), (80, 80), (64, 80), (72, 72), (56, 88), (96, 72), (72, 96),
    (80, 64), (64, 64), (88, 72), (72, 88), (96, 64), (80, 56), (56, 80), (64, 96),
]  # fmt: skip


class Known:
    """As much of an open dataset as an order asks for: its table of pairs."""

    def __init__(self, sizes, weights=None):
        self.pairs = PairTable.of(pairs_of(sizes))
        self.version, self.train = 2, list(range(len(sizes)))
        if weights:
            self.pairs.subsets = {"": 1.0, **{f"{i}": weight for i, weight in enumerate(weights)}}
            self.pairs.numbers["subset"] = np.arange(1, len(sizes) + 1, dtype=np.int32)


def order_of(sizes, weights=None, **options):
    given = {"batch_size": 4, "repeats": 1, "seed": 0, "crop": None}
    return BatchOrder(Known(sizes, weights), **(given | options))


def twins(batches):
    return sum(len(set(batch)) < len(batch) for batch in batches.tolist())


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(4, 12), st.integers(4, 12)), min_size=1, max_size=40),
    batch_size=st.integers(1, 6),
    repeats=st.integers(1, 3),
    crop=st.sampled_from([None, 5, 8]),
    accumulation=st.integers(1, 5),
)
def test_every_pair_comes_as_often_as_asked_in_full_batches_of_one_size(sizes, batch_size, repeats, crop, accumulation):
    order = order_of(sizes, batch_size=batch_size, repeats=repeats, crop=crop, accumulation=accumulation)
    batches = order.epoch(3)
    shown = Counter(batches.flatten().tolist())
    assert set(shown) == set(range(len(sizes))) and min(shown.values()) >= repeats
    assert batches.shape == (order.per_epoch, batch_size)
    assert all(len({tuple(order.shown[i]) for i in batch}) == 1 for batch in batches.tolist())
    used = len(np.unique(order.shown, axis=0))
    assert order.per_epoch % accumulation == 0 or used == 1
    assert batches.size < len(sizes) * repeats + used * batch_size + accumulation * batch_size  # filled only where due
    assert np.array_equal(batches, order.epoch(3))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(6, 9), st.integers(6, 9)), min_size=8, max_size=40),
    batch_size=st.integers(2, 6),
    repeats=st.integers(1, 3),
    accumulation=st.integers(1, 3),
)
def test_a_batch_holds_a_pair_twice_only_where_a_size_has_fewer_pairs_than_the_batch(
    sizes, batch_size, repeats, accumulation
):
    order = order_of(sizes, batch_size=batch_size, repeats=repeats, accumulation=accumulation)
    pairs = Counter(map(tuple, order.shown.tolist()))
    if min(pairs.values()) >= batch_size:
        assert twins(order.epoch(0)) == 0


def test_thirty_pictures_cut_by_hand_share_a_few_sizes_and_no_batch_holds_one_twice():
    alone = Counter(BY_HAND)
    assert len(alone) > 20 and max(alone.values()) < 4
    order = order_of(BY_HAND)
    sizes = Counter(map(tuple, order.shown.tolist()))
    assert len(sizes) <= 7 and min(sizes.values()) >= 4
    assert sum(twins(order.epoch(epoch)) for epoch in range(20)) == 0
    whole = np.array(BY_HAND).prod(1)
    kept = order.shown[:, 1:].prod(1) / whole
    assert kept.min() >= 0.5 and kept.mean() > 0.8


def test_a_panorama_does_not_cut_the_squares_beside_it():
    sizes = np.array([(1, 8, 64)] + [(1, 32, 32)] * 50)
    assert np.array_equal(merge_sizes(sizes, 4), sizes)


def test_clips_share_with_clips_of_their_length_alone():
    sizes = np.array([(5, 16, 16), (5, 16, 15), (9, 16, 16), (1, 16, 16)] * 2)
    merged = merge_sizes(sizes, 4)
    assert Counter(map(tuple, merged.tolist())) == {(5, 16, 15): 4, (9, 16, 16): 2, (1, 16, 16): 2}


def test_sizes_that_a_batch_can_be_made_of_stay_as_they_are():
    sizes = np.array([(1, 8, 8)] * 4 + [(1, 8, 9)] * 5)
    assert np.array_equal(merge_sizes(sizes, 4), sizes)
    assert np.array_equal(shown_sizes(sizes, 8), np.array([(1, 8, 8)] * 9))


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_weight_says_how_often_a_pair_is_drawn(repeats):
    weights = [3.0, 0.5, 2.25] + [1.0] * 21
    order = order_of([(8, 8)] * 24, weights, repeats=repeats)
    epochs, drawn = 200, Counter()
    for epoch in range(epochs):
        once = Counter(order.epoch(epoch).flatten().tolist())
        assert once[0] >= 3 * repeats and once[1] <= repeats + 1
        drawn += once
    rates = np.array([drawn[i] for i in range(24)]) / epochs / repeats
    total = order.per_epoch * 4 / (sum(weights) * repeats)  # an epoch is filled up to whole batches
    assert np.allclose(rates, np.array(weights) * total, rtol=0.1)
    assert sum(twins(order.epoch(epoch)) for epoch in range(20)) == 0


@pytest.mark.parametrize("accumulation", [2, 3, 4])
def test_the_batches_of_one_step_have_like_sizes(accumulation):
    sizes = [(8, 12)] * 21 + [(12, 8)] * 17 + [(10, 10)] * 30 + [(16, 16)] * 9
    order = order_of(sizes, accumulation=accumulation)
    steps = order.epoch(0).reshape(-1, accumulation, 4)
    shapes = [{tuple(order.shown[i]) for i in step.flatten()} for step in steps]
    assert sum(len(found) > 1 for found in shapes) <= 4  # no more than there are sizes
    plain = order_of(sizes).epoch(0)
    plain = plain[: len(plain) // accumulation * accumulation].reshape(-1, accumulation, 4)
    assert sum(len({tuple(order.shown[i]) for i in step.flatten()}) > 1 for step in plain) > 4


def test_version_1_is_ordered_alike_only_where_that_is_asked_for(build, tmp_path):
    folder = as_version_1(build([(8, 8), (9, 9)] * 8, held_out=0), tmp_path / "old")
    options = {"batch_size": 2, "seed": 3}
    before = [BatchSource(folder, **options)[k]["z"].shape for k in range(8)]
    same = BatchSource(folder, accumulation=4, **options)
    assert [same[k]["z"].shape for k in range(8)] == before
    alike = BatchSource(folder, accumulation=4, alike=True, **options)
    assert all(len({alike[4 * step + k]["z"].shape for k in range(4)}) == 1 for step in range(2))


def write(folder, *clips):
    with DatasetWriter(folder, latent=SD15, vae=None, base={"kind": "latents"}) as writer:
        for i, (shape, mask) in enumerate(clips):
            z = torch.arange(8 * 8.0).reshape(8, 8).expand(shape)
            given = {"source": f"{i}", "sha256": "0", "group": f"{i}", "split": "train", "mask": mask}
            writer.add(z, z + 1, **given)
    return folder


def test_a_mask_is_cut_as_its_pair_is_and_is_one_where_there_is_none(tmp_path):
    mask = (torch.arange(64.0).reshape(8, 8) / 63).clamp(min=0.01)
    source = BatchSource(write(tmp_path / "data", ((4, 8, 8), mask), ((4, 8, 8), None)), batch_size=2, crop=5)
    seen = set()
    for k in range(10):
        batch = source[k]
        assert batch["mask"].shape == (2, 1, 5, 5)
        for z, weight in zip(batch["z"], batch["mask"], strict=True):
            expected = (z[:1] / 63).clamp(min=0.01)
            seen.add(torch.equal(weight, torch.ones(1, 5, 5)))
            assert torch.equal(weight, torch.ones(1, 5, 5)) or torch.equal(weight, expected)
    assert seen == {True, False}


def test_clips_are_given_where_they_are_asked_for_and_refused_elsewhere(tmp_path):
    folder = write(tmp_path / "data", ((3, 4, 8, 8), None), ((3, 4, 8, 8), None))
    assert BatchSource(folder, batch_size=2, crop=6, clips=True)[0]["z"].shape == (2, 3, 4, 6, 6)
    with pytest.raises(BadInput, match="holds clips of up to 3 frames, and this trains on stills"):
        BatchSource(folder, batch_size=2)


def draw_noise(batch, generator):
    return {"e": torch.randn(batch["z"].shape, generator=generator)}


@pytest.mark.parametrize("workers", [0, 2])
def test_what_an_objective_draws_is_made_where_batches_are_read(build, workers):
    from training.data.loading import batches
    from training.data.seeds import seeded_generator

    source = BatchSource(RefinerDataset.open(build([(4, 4)] * 5)), batch_size=2, seed=5, draw=draw_noise)
    given = batches(source, 3, workers, torch.device("cpu"))
    for index in range(3, 7):
        batch = next(given)
        expected = torch.randn(batch["z"].shape, generator=seeded_generator(5, "noise", index))
        assert batch["index"] == index and torch.equal(batch["e"], expected)
    given.close()
