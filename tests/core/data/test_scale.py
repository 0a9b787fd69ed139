"""100,000 pairs, drawn and tiny: memory that does not grow with what was read, and nothing read through twice."""

import time

import pytest

from benchmarks.dataset_scale import MiB, in_a_process
from training.data.verified import CACHE

PAIRS = 100_000


@pytest.mark.full
def test_a_hundred_thousand_pairs_go_on_after_a_kill_open_flat_and_are_not_read_through_again(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    folder = f"Path({str(tmp_path / 'pairs')!r})"
    in_a_process(f"build({folder}, {PAIRS}, {PAIRS // 2})", killed=True)
    assert in_a_process(f"build({folder}, {PAIRS})") > PAIRS * 0.45
    time.sleep(2.1)  # what was written this moment is read through once
    first = in_a_process(f"start({folder}, 1)")
    again = in_a_process(f"start({folder}, 12000)")
    assert first["pairs"] == PAIRS and first["shards"] > 20
    assert first["shards_read"] < first["shards"] and again["shards_read"] == 0
    assert again["open_bytes"] < 1000 * PAIRS
    assert again["grown_bytes"] < 32 * MiB
