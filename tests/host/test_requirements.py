"""What the pack asks for does not break a host: resolved beside the host's own list and an older transformers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host.server import PACK

# The oldest that the host's own list allows. diffusers and peft, both newer, have to live with it.
OLD_TRANSFORMERS = "transformers==4.50.3"
NETWORK = "Max retries|NewConnection|resolution|getaddrinfo|timed out|unreachable|Connection|SSLError|dns error|connect"


@pytest.fixture(scope="module")
def asked(host_path) -> list[str]:
    """Arguments of an install: the host's list, ours with all extras, and an older transformers.

    torchaudio is not in the developers' environment, so the host's own list would fetch it: that is not ours to judge.
    """
    files = [host_path / "requirements.txt", PACK / "requirements.txt", PACK / "requirements-extra.txt"]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    wanted = [line.partition("#")[0].strip() for line in lines]
    return [*(line for line in wanted if line and line != "torchaudio"), OLD_TRANSFORMERS]


def run(*command: os.PathLike | str) -> subprocess.CompletedProcess:
    ran = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    if ran.returncode and re.search(NETWORK, ran.stderr):
        pytest.skip(f"there is no network to ask the registry: {ran.stderr.strip().splitlines()[-1][:200]}")
    return ran


def test_what_is_installed_fits_together():
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.full
def test_pip_leaves_torch_alone(asked, tmp_path):
    report = tmp_path / "report.json"
    ran = run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--dry-run",
        "--report", report, *asked,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    changed = {entry["metadata"]["name"].lower() for entry in json.loads(report.read_text())["install"]}
    assert "transformers" in changed  # it had something to do
    assert not {name for name in changed if re.match(r"torch|nvidia|triton", name)}


@pytest.mark.full
def test_uv_leaves_torch_alone(asked, tmp_path):
    """As managers that install by uv ask it. A uv of this test's own, for the developers' environment may have none."""
    uv = tmp_path / "uv"
    got = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", uv, "uv")
    assert got.returncode == 0, got.stderr[-3000:]
    (program,) = (path for path in Path(uv / "bin").iterdir() if path.stem == "uv")
    ran = run(program, "pip", "install", "--dry-run", "--python", sys.executable, *asked)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "+ transformers==" in ran.stderr
    assert not re.findall(r"^ [+~-] (?:torch|nvidia|triton)\S*", ran.stderr, re.MULTILINE), ran.stderr
