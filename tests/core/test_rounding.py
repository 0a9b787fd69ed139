"""Rounding to bfloat16 and the bits it is done with, against plain Python."""

import math

import pytest
import torch

from training.run.optim.noise import Block, bits_of, block_index, stream_key, wrapped
from training.run.optim.rounding import join_float32, round_stochastically, split_float32


def floats(*bits):
    return torch.tensor([wrapped(b) for b in bits], dtype=torch.int32).view(torch.float32)


NANS = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FFF8000, 0xFFFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFF0000]


def edges_and_others():
    """Every exponent with mantissas at both ends and between, both signs; finite, infinite and NaN."""
    mantissas = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7F8000, 0x7FFFFF])
    bits = (torch.arange(512)[:, None] << 23) + mantissas
    return ((bits.flatten() + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("noise", [0, 1, 0x7FFF, 0x8000, 0xFFFF, -1])
def test_every_nan_stays_nan_and_nothing_else_becomes_one(noise):
    x = torch.cat([edges_and_others(), floats(*NANS)])
    rounded = round_stochastically(x, torch.full(x.shape, noise, dtype=torch.int32))
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded.isnan(), x.isnan())
    nearest, rest = split_float32(x)
    assert torch.equal(nearest.isnan(), x.isnan()) and torch.equal(join_float32(nearest, rest).isnan(), x.isnan())


def test_infinity_and_zero_keep_their_value_and_sign():
    x = floats(0x7F800000, 0xFF800000, 0, 0x80000000)
    rounded = round_stochastically(x, torch.full((4,), 0xFFFF, dtype=torch.int32)).float()
    assert torch.equal(rounded.view(torch.int32), x.view(torch.int32))


def test_a_number_goes_to_one_of_its_two_neighbours_and_is_right_on_average():
    noise = torch.arange(2**16, dtype=torch.int32)  # every possible noise once
    for value in (1 + 1 / 1024, -math.pi, 3e-39, 1e30):
        x = torch.full((2**16,), value)
        rounded = round_stochastically(x, noise).double()
        below, above = rounded.min(), rounded.max()
        assert set(rounded.tolist()) == {float(below), float(above)} and below < float(x[0]) < above
        assert float(rounded.mean()) == pytest.approx(float(x[0]), rel=1e-12)


def test_what_is_a_bfloat16_already_never_moves():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(round_stochastically(x.float(), torch.full((1000,), 0xFFFF, dtype=torch.int32)), x)


def test_split_loses_no_bit_and_its_weight_is_the_nearest():
    x = edges_and_others()
    x = x[~x.isnan()]
    nearest, rest = split_float32(x)
    assert rest.dtype == torch.int16 and torch.equal(join_float32(nearest, rest).view(torch.int32), x.view(torch.int32))
    ties = (x.view(torch.int32) & 0xFFFF) == 0x8000  # to the larger one, where torch takes the even one
    assert torch.equal(nearest[~ties], x[~ties].bfloat16())


def hash_in_python(index, first, second):
    """lowbias32 with a key, in whole numbers."""
    x = (index + first) % 2**32
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x ^= second % 2**32
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_the_bits_are_those_of_the_hash():
    index = [0, 1, 2, 65535, 2**31 - 1, 2**31, 2**32 - 1]
    for first, second in [(0, 0), (123456789, -987654321), (-1, 2**31 - 1), stream_key(3, 4, "conv_in.weight")]:
        found = bits_of(torch.tensor([wrapped(i) for i in index], dtype=torch.int32), first, second).tolist()
        assert [b % 2**32 for b in found] == [hash_in_python(i, first, second) for i in index]


def test_the_bits_are_even_and_differ_by_seed_step_name_and_element():
    keys = [stream_key(*given) for given in [(0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b")]]
    assert len(set(keys)) == 4 and stream_key(0, 1, "a") == keys[0]
    count = 2**18
    index = torch.arange(count, dtype=torch.int32)
    streams = torch.stack([bits_of(index, *key) for key in keys])
    for half in (streams & 0xFFFF, (streams >> 16) & 0xFFFF):
        uniform = half.double() / 2**16
        assert float((uniform.mean(1) - 0.5).abs().max()) < 5 / math.sqrt(12 * count)
        assert float(torch.corrcoef(uniform).triu(1).abs().max()) < 5 / math.sqrt(count)
        neighbours = torch.stack([uniform[0, :-1], uniform[0, 1:]])
        assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 5 / math.sqrt(count)
        spread = torch.bincount((half[0] >> 8).long(), minlength=256).double()
        chi = float(((spread - count / 256) ** 2 / (count / 256)).sum())
        assert 255 - 5 * math.sqrt(510) < chi < 255 + 5 * math.sqrt(510)


def test_an_element_has_one_index_whichever_way_its_tensor_is_cut():
    whole = torch.arange(4 * 6 * 5, dtype=torch.int32).reshape(4, 6, 5)
    cut = whole[1:3, 2:6, 0:5]
    found = block_index((2, 4, 5), Block((4, 6, 5), (1, 2, 0)), torch.device("cpu"))
    assert found.dtype == torch.int32 and torch.equal(found, cut.flatten())
    far = block_index((2,), Block((2**33,), (2**32 - 1,)), torch.device("cpu"))
    assert far.tolist() == [-1, 0]  # 2^32 apart share their bits
