"""The real host, booted once for the whole session, with the test checkpoints in its models folder."""

import os
import re
from pathlib import Path

import pytest

from tests.host.checkpoints import FULL, SMALL, make_checkpoints
from tests.host.dataset_graphs import real_stills, small_pictures
from tests.host.host_process import passed
from tests.host.server import PACK, HostServer

STATE = PACK / ".dev"  # what dev.py keeps: the host, and here the checkpoints between two sessions


def pytest_collection_modifyitems(items):
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        if {"host", "host_path"} & asked:
            item.add_marker("host")
        if "host" in asked:
            item.add_marker("server")


@pytest.fixture(scope="session")
def host_path() -> Path:
    """The folder of the host's main.py: REF2V_HOST (dev.py sets it), else what `dev.py setup` has unpacked."""
    path = Path(os.environ.get("REF2V_HOST") or STATE / "host" / "ComfyUI")
    if not (path / "main.py").is_file():
        pytest.fail(f"There is no ComfyUI at {path}. Run `python3 dev.py test`, which sets it up, or set REF2V_HOST.")
    return path


@pytest.fixture(scope="session")
def host(host_path, tmp_path_factory):
    """The session's host. Tests share it: use file and folder names of your own."""
    base = tmp_path_factory.mktemp("host")
    make_checkpoints(host_path, base / "models" / "checkpoints", SMALL, cache=STATE / "checkpoints")
    with HostServer(host_path, base=base) as server:
        yield server


@pytest.fixture(scope="session")
def full_checkpoint(host_path, host) -> str:
    """The name under which the host finds a checkpoint with the true shape of SD 1.5 (5 GiB of memory once loaded)."""
    make_checkpoints(host_path, host.base / "models" / "checkpoints", (FULL,), cache=STATE / "checkpoints")
    return FULL


@pytest.fixture
def check(results, request):
    """Of the `results` of a script that ran beside the host, those of the check that the test is named after."""
    return passed(results, request.node.originalname.removeprefix("test_"))


@pytest.fixture(scope="session")
def stills() -> list[Path]:
    return real_stills()


@pytest.fixture
def folder(host, stills, request):
    """input/<test's name> with eight small pictures, and the same name for a node's `folder`."""
    return small_pictures(host.base / "input" / re.sub(r"\W", "_", request.node.name), stills)
