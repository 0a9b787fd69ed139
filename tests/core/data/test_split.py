"""No picture is trained on and tested on at once."""

import imagehash
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from training.data.buckets import resize_and_crop
from training.data.degrade import degrade
from training.data.picture_files import list_pictures
from training.data.pictures import read_picture, to_uint8
from training.data.split import group_of, perceptual_hash, split
from training.errors import BadInput


def far_apart(count):
    """Hashes that differ in 16 bits or more from each other."""
    return [f"{part * 0x0001_0001_0001_0001:016x}" for part in (0, 0xF, 0xF0, 0xF00, 0xF000)[:count]]


@pytest.mark.parametrize(
    "name, group",
    [
        ("fox-1.webp", "fox"),
        ("fox_12.png", "fox"),
        ("a/fox-2.webp", "a/fox"),
        ("fox.png", "fox"),
        ("fox2.png", "fox2"),
        ("v1.5-3.png", "v1.5"),
        ("-1.png", "-1"),
        ("a/-1.png", "a/-1"),
    ],
)
def test_siblings_share_the_name_before_their_number(name, group):
    assert group_of(name) == group


def test_template_siblings_stay_together_and_enough_is_held_out(template_stills):
    names = list_pictures(template_stills)
    sides = split(names, None, 12, seed=0)
    assert set(sides) == set(names)
    side_of_group = {}
    for name, (group, side) in sides.items():
        assert group == group_of(name)
        assert side_of_group.setdefault(group, side) == side
    held = sum(side == "held_out" for _, side in sides.values())
    assert 12 <= held <= 14


def test_a_hash_survives_what_keeps_a_picture_the_same(template_stills):
    names = list_pictures(template_stills)[:8]
    pictures = [resize_and_crop(read_picture(template_stills / name), (256, 256)) for name in names]
    copies = [degrade(resize_and_crop(picture, (160, 160)), "jpeg", 60) for picture in pictures]
    every = [f"original {i}.png" for i in range(8)] + [f"copy {i}.png" for i in range(8)]
    sides = split(every, [perceptual_hash(picture) for picture in pictures + copies], 4, seed=0)
    for i in range(8):
        assert sides[f"original {i}.png"] == sides[f"copy {i}.png"]
    assert {side for _, side in sides.values()} == {"train", "held_out"}


def test_the_hash_is_imagehashs_bit_for_bit(template_stills):
    pictures = [read_picture(template_stills / name) for name in list_pictures(template_stills)[:24]]
    pictures += [torch.full((3, 40, 30), value) for value in (0.0, 0.5, 1.0)]  # flat: all but one coefficient is 0
    pictures += [torch.linspace(0, 1, 64).expand(3, 48, 64), torch.linspace(0, 1, 48)[:, None].expand(3, 48, 64)]
    for picture in pictures:
        assert perceptual_hash(picture) == str(imagehash.phash(Image.fromarray(to_uint8(picture))))


def test_near_hashes_join_whole_groups():
    names = ["fox-1.png", "fox-2.png", "wolf-1.png", "wolf-2.png", "hare.png"]
    a, b, c, d, e = far_apart(5)
    almost_b = f"{int(b, 16) ^ 0xFF << 56:016x}"  # 8 bits away
    sides = split(names, [a, b, almost_b, d, e], 1, seed=0)
    assert len({sides[name] for name in names[:4]}) == 1
    assert sides["fox-1.png"][0] == "fox" and sides["hare.png"] == ("hare", "held_out")
    nine_away = f"{int(b, 16) ^ 0x1FF << 55:016x}"
    assert split(names, [a, b, nine_away, d, e], 1, seed=0)["wolf-1.png"][0] == "wolf"


def test_a_numbered_series_is_not_one_group():
    names = [f"IMG_{i:04d}.jpg" for i in range(100)]
    sides = split(names, None, 10, seed=0)
    assert sum(side == "held_out" for _, side in sides.values()) == 10
    few = split(["cat_1.png", "cat_2.png", "cat_3.png"], None, 1, seed=0)  # the names tell nothing apart
    assert sum(side == "held_out" for _, side in few.values()) == 1


NAMES = st.lists(
    st.builds(lambda stem, n: f"{stem}-{n}.png", st.sampled_from("abcdefgh"), st.integers(1, 4)),
    min_size=2,
    max_size=30,
    unique=True,
)


@settings(max_examples=150, deadline=None)
@given(names=NAMES, share=st.floats(0.01, 0.99), seed=st.integers(0, 5), data=st.data())
def test_sides_never_share_a_group_train_is_never_empty_and_order_does_not_matter(names, share, seed, data):
    sides = split(names, None, share, seed)
    assert split(data.draw(st.permutations(names)), None, share, seed) == sides
    train, held = ({group for group, side in sides.values() if side == wanted} for wanted in ("train", "held_out"))
    assert train and held and not train & held
    count = sum(side == "held_out" for _, side in sides.values())
    assert count >= share * len(names) or len(train) == 1


def test_seeds_choose_different_pictures():
    names = [f"{stem}.png" for stem in "abcdefghijklmnop"]
    assert len({tuple(sorted(split(names, None, 4, seed).items())) for seed in range(5)}) == 5


def test_nothing_is_held_out_when_nothing_is_asked():
    assert {side for _, side in split(["a.png", "b.png"], None, 0, 0).values()} == {"train"}
    assert split(["a.png"], None, 0, 0) == {"a.png": ("a", "train")}


@pytest.mark.parametrize("held_out", [-1, 5, 6, 1.5, -0.5])
def test_a_held_out_number_that_cannot_be_is_refused(held_out):
    with pytest.raises(BadInput, match="held_out must be"):
        split([f"{stem}.png" for stem in "abcde"], None, held_out, 0)


def test_pictures_that_are_all_alike_cannot_be_split():
    with pytest.raises(BadInput, match="All 3 pictures look or are named alike"):
        split(["a.png", "b.png", "c.png"], ["0" * 16] * 3, 1, 0)
