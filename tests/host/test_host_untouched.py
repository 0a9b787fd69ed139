"""The pack replaces nothing of the host: other packs, and the host's next version, meet what they expect.

Case 10 of the public reports: a pack that had replaced core functions gave noise after a core update. The looking is
done by tests/host/untouched_in_host.py in a process of its own.
"""


import pytest

from tests.host.host_process import run_in_host


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    return run_in_host("untouched_in_host.py", host_path, tmp_path_factory.mktemp("untouched"))


def test_importing_the_pack_changes_no_attribute_of_the_host(results):
    assert results["import"]["looked at"] > 1000
    assert results["import"]["changed"] == []


def test_sampling_with_a_refiner_replaces_no_function_and_no_class(results):
    assert results["work"] == {"changed": []}


def test_selecting_precision_changes_no_attribute_of_the_host(results):
    assert results["precision"] == {"changed": []}
