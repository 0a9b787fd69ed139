"""Degradations take detail away and nothing else."""

import pytest
import torch

from training.data.buckets import resize_and_crop
from training.data.degrade import degrade
from training.data.picture_files import list_pictures
from training.data.pictures import read_picture
from training.errors import BadInput


@pytest.fixture(scope="module")
def photo(template_stills):
    return resize_and_crop(read_picture(template_stills / list_pictures(template_stills)[0]), (160, 112))


def detail(picture):
    return (picture[:, :, 1:] - picture[:, :, :-1]).abs().mean()


@pytest.mark.parametrize("kind, weak, strong", [("resize", 2, 6), ("blur", 0.7, 3.0)])
def test_a_stronger_amount_takes_more_detail(photo, kind, weak, strong):
    results = [photo, degrade(photo, kind, weak), degrade(photo, kind, strong)]
    assert all(result.shape == photo.shape and result.min() >= 0 and result.max() <= 1 for result in results)
    details = [detail(result) for result in results]
    assert details[0] > details[1] > details[2]
    assert all(abs(result.mean() - photo.mean()) < 0.01 for result in results)  # the light stays


def test_jpeg_quality_orders_the_error(photo):
    errors = [(degrade(photo, "jpeg", quality) - photo).square().mean() for quality in (95, 50, 5)]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.05


@pytest.mark.parametrize("kind, amount", [("resize", 3), ("blur", 2.0), ("jpeg", 30)])
def test_the_result_depends_on_nothing_else(photo, kind, amount):
    before = photo.clone()
    assert torch.equal(degrade(photo, kind, amount), degrade(photo, kind, amount))
    assert torch.equal(photo, before)


def test_blur_spreads_a_point_by_its_sigma():
    point = torch.zeros(3, 65, 65)
    point[:, 32, 32] = 1
    spread = degrade(point, "blur", 4.0)[0]
    offsets = torch.arange(-32.0, 33.0)
    assert spread.sum() == pytest.approx(1, abs=1e-4)
    assert (spread.sum(0) * offsets**2).sum().sqrt() == pytest.approx(4.0, rel=0.02)


def test_blur_leaves_a_flat_picture_and_its_border_alone():
    flat = torch.full((3, 20, 17), 0.25)
    assert torch.allclose(degrade(flat, "blur", 30.0), flat, atol=1e-5)  # wider than the picture


@pytest.mark.parametrize("factor", [1.5, 3, 32])
def test_resizing_small_and_odd_pictures_works(factor):
    assert degrade(torch.rand(3, 17, 23), "resize", factor).shape == (3, 17, 23)


@pytest.mark.parametrize(
    "kind, amount, words",
    [
        ("sharpen", 1, "must be one of resize, blur, jpeg, not 'sharpen'"),
        ("resize", 1, "above 1, 32 at most, not 1"),
        ("blur", 0, "sigma in pixels. must be above 0"),
        ("blur", float("nan"), "not nan"),
        ("jpeg", 0, "from 1 to 100, not 0"),
        ("jpeg", 50.5, "whole number"),
    ],
)
def test_what_cannot_be_is_refused(kind, amount, words):
    with pytest.raises(BadInput, match=words):
        degrade(torch.rand(3, 32, 32), kind, amount)
