"""The interval that a benchmark gives with its median."""

import math

import pytest
import torch

from benchmarks.results import median_interval


@pytest.mark.parametrize("count, ranks", [(6, (1, 6)), (9, (2, 8)), (20, (6, 15)), (41, (14, 28))])
def test_the_interval_of_a_median_is_that_of_the_tables(count, ranks):
    """Ranks of the 95 % interval, as tables of the sign test have them."""
    values = [float(value) for value in torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1]
    assert median_interval(values) == ranks


def test_few_values_have_no_interval():
    assert median_interval([1.0] * 5) == (-math.inf, math.inf)


def test_it_holds_the_true_median_in_95_of_100_series():
    draws = torch.randn(2000, 21, generator=torch.Generator().manual_seed(0)).exp()  # skewed; its median is 1
    held = sum(low <= 1 <= high for low, high in map(median_interval, draws.tolist()))
    assert 0.94 <= held / len(draws) <= 0.99
