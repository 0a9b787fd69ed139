"""Room is made for training whatever lies among the host's loaded models (tests/host/unloading_in_host.py)."""

import pytest

from tests.host.host_process import all_passed, run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return all_passed(run_in_host("unloading_in_host.py", host_path, tmp_path_factory.mktemp("unloading")))


def test_models_that_only_the_collector_frees_do_not_break_the_unloading_of_others(results):
    assert results["garbage_among_the_loaded_models"] == {"before": 4, "inside": 0, "kept": 2}


def test_the_collector_is_on_again_afterwards(results):
    assert results["the_collector_goes_on_afterwards"] is True
