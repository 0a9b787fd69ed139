"""What is computed here in a few lines gives the numbers of the libraries that users are not asked to install.

scikit-image and ImageHash are in requirements-dev.txt for this alone (ImageHash: tests/core/data/test_split.py).
"""

import numpy as np
import pytest
import torch
from skimage.color import deltaE_ciede2000, rgb2lab
from skimage.metrics import structural_similarity

from training.data import metrics
from training.precision.colour import ciede2000, lab_of_rgb


@pytest.mark.parametrize("height, width", [(7, 20), (8, 8), (11, 11), (64, 48)])
def test_ssim_is_scikit_images(height, width):
    generator = torch.Generator().manual_seed(height)
    target = torch.rand(3, height, width, generator=generator)
    side = min(height, width)
    for strength in (0.01, 0.5):
        picture = (target + strength * torch.rand(3, height, width, generator=generator)) / (1 + strength)
        theirs = structural_similarity(
            target.numpy(), picture.numpy(), channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, win_size=min(11, side - 1 + side % 2),
        )  # fmt: skip
        # theirs is the mean of three channels, each rounded to float32
        assert metrics.ssim(picture, target) == pytest.approx(float(theirs), abs=1e-7)


def test_colours_and_their_differences_are_scikit_images():
    rgb = np.random.default_rng(0).random((2, 40_000, 3))
    rgb[1, :10_000] = np.clip(rgb[0, :10_000] + 0.003, 0, 1)  # near each other
    rgb[:, -300:] = rgb[:, -300:, :1]  # greys have no hue
    rgb[0, -300:-200], rgb[1, -300:-200] = 0, 1
    labs = [lab_of_rgb(each) for each in rgb]
    np.testing.assert_allclose(labs, rgb2lab(rgb), atol=1e-10)
    np.testing.assert_allclose(ciede2000(*labs), deltaE_ciede2000(*labs), atol=1e-9)
    assert ciede2000(labs[0], labs[0]).max() == 0


# L*, a*, b* of two colours and their difference, from table 1 of Sharma, Wu & Dalal 2005: where programs went wrong
PUBLISHED = [
    (50, 2.6772, -79.7751, 50, 0, -82.7485, 2.0425),
    (50, 0, 0, 50, -1, 2, 2.3669),
    (50, 2.49, -0.001, 50, -2.49, 0.0009, 7.1792),
    (50, 2.49, -0.001, 50, -2.49, 0.0011, 7.2195),
    (50, 2.5, 0, 50, 0, -2.5, 4.3065),
    (50, 2.5, 0, 61, -5, 29, 22.8977),
    (2.0776, 0.0795, -1.135, 0.9033, -0.0636, -0.5514, 0.9082),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_the_difference_is_that_of_the_published_table(row):
    assert ciede2000(np.array(row[:3], float), np.array(row[3:6], float)) == pytest.approx(row[6], abs=1e-4)
