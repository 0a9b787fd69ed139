"""Batches that are read ahead come in order, with their errors, and leave no thread behind."""

import threading

import pytest

from training.data.prefetch import prefetched


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "ref2v-prefetch"]


def test_order_and_end():
    assert list(prefetched(range(100), ahead=3)) == list(range(100))
    assert not readers()


def test_an_error_comes_in_its_turn():
    def items():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    read = prefetched(items())
    assert [next(read), next(read)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(read)
    assert not readers()


def test_no_more_than_asked_is_read_ahead():
    made = []
    asked = threading.Event()

    def items():
        for i in range(1000):
            made.append(i)
            if len(made) > 4:
                asked.set()
            yield i

    read = prefetched(items(), ahead=2)
    next(read)
    assert not asked.wait(0.3)  # one given, two waiting, one in the hand
    read.close()
    assert not readers()


def test_a_reader_that_leaves_ends_the_thread():
    def endless():
        while True:
            yield 0

    read = prefetched(endless())
    next(read)
    del read
    assert not readers()
