"""Sizes to train at, and cutting pictures to them."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from training.data.buckets import (
    BUDGET_768P,
    BUDGET_1024P,
    assign_bucket,
    assign_buckets,
    resize_and_crop,
)
from training.errors import BadInput


@pytest.mark.parametrize(
    "size, options, expected",
    [
        ((1024, 1024), {}, (768, 768)),
        ((1024, 1024), {"max_pixels": BUDGET_1024P, "multiple": 64}, (1024, 1024)),
        ((3000, 2000), {"multiple": 64}, (896, 576)),
        ((2000, 3000), {"multiple": 64}, (576, 896)),
        ((1920, 1080), {"multiple": 8}, (1024, 576)),  # exactly 16:9
        ((300, 263), {}, (296, 256)),  # smaller than the budget: its own size, floored
        ((300, 263), {"multiple": 64}, (256, 256)),
        ((768, 768), {}, (768, 768)),
    ],
)
def test_sizes_that_people_have(size, options, expected):
    assert assign_bucket(*size, **options) == expected


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(16, 9000),
    height=st.integers(16, 9000),
    multiple=st.sampled_from([8, 16, 64]),
    budget=st.sampled_from([256 * 256, BUDGET_768P, BUDGET_1024P]),
)
def test_a_bucket_keeps_the_budget_the_multiple_and_the_aspect_and_never_scales_up(width, height, multiple, budget):
    assume(min(width, height) >= multiple and max(width, height) <= 8 * min(width, height))
    w, h = assign_bucket(width, height, max_pixels=budget, multiple=multiple)
    assert w % multiple == h % multiple == 0 and w * h <= budget
    assert 0 < w <= width and 0 < h <= height
    # One multiple of the ideal size on either side is the most that rounding may cost.
    scale = min(1, math.sqrt(budget / (width * height)))
    assert w > width * scale - 2 * multiple or h > height * scale - 2 * multiple
    tolerance = math.log1p(multiple / min(w, h)) + 1e-9
    assert abs(math.log(w * height / (h * width))) <= tolerance
    assert assign_bucket(height, width, max_pixels=budget, multiple=multiple)[0] * w == h * w  # turned, not changed


def test_what_is_too_small_is_refused_by_name():
    with pytest.raises(BadInput, match="a.png is 60x400 pixels: each side must have at least 64"):
        assign_bucket(60, 400, multiple=64, name="a.png")
    with pytest.raises(BadInput, match="each side must have at least 256"):
        assign_bucket(200, 400, min_side=250, multiple=64)
    with pytest.raises(BadInput, match="max_pixels 1000 is too small for sides of 64"):
        assign_bucket(512, 512, max_pixels=1000, multiple=64)


@pytest.mark.parametrize("position", ["center", 0, 1, 2])
@pytest.mark.parametrize("size", [(64, 64), (96, 32), (40, 88)])
def test_a_cut_has_the_size_asked_for_and_stays_in_range(size, position):
    picture = torch.rand(3, 117, 203, generator=torch.Generator().manual_seed(0)).round()  # hard edges overshoot
    cut = resize_and_crop(picture, size, position)
    assert cut.shape == (3, size[1], size[0]) and cut.min() >= 0 and cut.max() <= 1 and cut.is_contiguous()


def test_the_middle_is_kept_and_seeds_wander():
    ramp = torch.linspace(0, 1, 300).expand(3, 100, 300)
    assert resize_and_crop(ramp, (100, 100)).mean() == pytest.approx(0.5, abs=1e-4)
    means = {round(resize_and_crop(ramp, (100, 100), seed).mean().item(), 3) for seed in range(20)}
    assert len(means) > 10
    assert torch.equal(resize_and_crop(ramp, (100, 100), 3), resize_and_crop(ramp, (100, 100), 3))


def test_before_and_after_are_cut_at_the_same_place():
    after = torch.nn.functional.interpolate(
        torch.rand(1, 3, 10, 30, generator=torch.Generator().manual_seed(0)), (200, 600), mode="bicubic"
    )[0].clamp(0, 1)
    before = resize_and_crop(after, (300, 100))  # half the resolution, same view
    for seed in range(5):
        first, second = (resize_and_crop(picture, (96, 96), seed) for picture in (before, after))
        assert (first - second).abs().mean() < 0.02


def test_a_cut_of_the_same_size_is_the_picture_itself():
    picture = torch.rand(3, 64, 48)
    assert torch.equal(resize_and_crop(picture, (48, 64)), picture)


# 30 pictures as a person cut them
BY_HAND = [(700 + 37 * (i * 7 % 11), 600 + 29 * (i * 5 % 13)) for i in range(30)]


@pytest.mark.parametrize("multiple", [8, 64])
def test_pictures_cut_by_hand_share_a_few_sizes(multiple):
    alone = {assign_bucket(*size, multiple=multiple) for size in BY_HAND}
    shared = Counter(assign_buckets(BY_HAND, multiple=multiple))
    assert len(alone) >= 16 and len(shared) <= 3 and min(shared.values()) >= 8


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(64, 3000), st.integers(64, 3000)), min_size=1, max_size=40),
    fewest=st.integers(1, 8),
)
def test_shared_sizes_keep_the_budget_and_the_multiple_and_never_scale_up(sizes, fewest):
    for size, bucket in zip(sizes, assign_buckets(sizes, multiple=64, fewest=fewest), strict=True):
        own = assign_bucket(*size, multiple=64)
        assert bucket[0] % 64 == bucket[1] % 64 == 0 and bucket[0] * bucket[1] <= BUDGET_768P
        assert bucket[0] <= size[0] and bucket[1] <= size[1]
        assert bucket == own or bucket[0] * bucket[1] >= own[0] * own[1] / 2


def test_sizes_that_enough_pictures_have_stay_and_a_panorama_stays_by_itself():
    sizes = [(1024, 1024)] * 8 + [(1920, 1080)] * 9 + [(4000, 400)]
    assert assign_buckets(sizes) == [assign_bucket(*size) for size in sizes]
