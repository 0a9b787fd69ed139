"""The largest picture and batch that fit are those that fit, whatever size was asked about."""

import pytest

from training.memory.estimate import estimate_attention
from training.memory.machine import GIB, Machine, planned_machine
from training.memory.models import PRESETS
from training.memory.network_estimate import estimate_network

MACHINES = {
    "GPU": planned_machine(1.0),
    "main memory": Machine(int(1.2 * GIB), 2 * GIB, False, "the main memory"),
}


@pytest.mark.parametrize("backend", ["basic", "pytorch", "sub-quadratic", "split"])
@pytest.mark.parametrize("where", MACHINES)
def test_the_largest_size_is_the_same_whatever_was_asked(where, backend):
    machine, said = MACHINES[where], {}
    for width, height in ((64, 32), (1400, 700), (2048, 1024), (32768, 16384)):
        answer = estimate_network("pixel-small", width, height, machine, backend=backend)
        size = answer.largest_size
        if not (answer.fits and size == answer.pixels and not answer.exact):  # cut work: more than is known may fit
            said[width] = size
    assert len(set(said.values())) == 1, said
    width, height = said[64]
    assert width == 2 * height and height >= 32
    at = estimate_network("pixel-small", width, height, machine, backend=backend)
    assert at.fits and (at.largest_size == (width, height) or not at.exact)
    if at.exact:
        assert not estimate_network("pixel-small", width + 2, height + 1, machine, backend=backend).fits
        assert "(at least)" not in at.report()
    else:
        assert "(at least)" in at.report()


@pytest.mark.parametrize("backend", ["basic", "pytorch"])
def test_the_largest_batch_fits_and_one_more_does_not(backend):
    machine = MACHINES["GPU"]
    answers = [estimate_network("pixel-small", 128, 128, machine, batch=n, backend=backend) for n in (1, 3, 500)]
    assert len({answer.largest_batch for answer in answers}) == 1
    most = answers[0].largest_batch
    for batch, fits in ((most, True), (most + 1, False)):
        answer = estimate_network("pixel-small", 128, 128, machine, batch=batch, backend=backend)
        assert answer.fits is fits


def test_where_not_even_the_smallest_fits_none_is_said():
    answer = estimate_network("pixel-small", 512, 512, planned_machine(0.001), backend="basic")
    assert answer.largest_size == (0, 0) and answer.largest_batch == 0
    assert "nor does any smaller size" in answer.verdict and "Largest that fits: none." in answer.report()


@pytest.mark.parametrize("backend", ["basic", "split", "sub-quadratic"])
def test_attention_memory_gives_one_largest_size_too(backend):
    said = set()
    for side in (4096, 16384, 131072):
        answer = estimate_attention(PRESETS["SD1.5"], side, side, planned_machine(4), backend=backend)
        if not answer.fits:
            said.add(answer.fitting)
    assert len(said) <= 1, said
