"""The pack replaces nothing of the host: other packs, and the host's next version, meet what they expect.

Case 10 of the public reports: a pack that had replaced core functions gave noise after a core update. The looking is
done by tests/host/untouched_in_host.py in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("untouched_in_host.py")


@pytest.fixture(scope="module")
def results(host_path, tmp_path_factory):
    out = tmp_path_factory.mktemp("untouched") / "results.json"
    command = [sys.executable, str(SCRIPT), str(host_path), str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    if not out.is_file():
        pytest.fail(f"{SCRIPT.name} ended with code {ran.returncode}:\n{ran.stderr[-4000:]}")
    return json.loads(out.read_text())


def test_importing_the_pack_changes_no_attribute_of_the_host(results):
    assert results["import"]["looked at"] > 1000
    assert results["import"]["changed"] == []


def test_sampling_with_a_refiner_replaces_no_function_and_no_class(results):
    assert results["work"] == {"changed": []}


def test_selecting_precision_changes_no_attribute_of_the_host(results):
    assert results["precision"] == {"changed": []}
