"""The checkers that others have made for packs, on the whole checkout and on every workflow.

They come from the registry into a virtual environment of their own, .dev/checkers, so that nothing of theirs gets into
the one that the host and the tests run in.
"""

import os
import subprocess
import venv

import pytest

from tests.host.server import PACK, HostServer
from tests.host.workflows import NAMES, api

CHECKERS = ("comfy-test", "comfy-lint")
HOME = PACK / ".dev" / "checkers"
BIN = HOME / ("Scripts" if os.name == "nt" else "bin")

pytestmark = pytest.mark.full

# Where a file belongs, by the input that names it. The host's lists hold names alone: an empty file stands for each.
FOLDERS = {
    "image": "input", "latent": "input", "ckpt_name": "models/checkpoints", "refiner": "models/refiners",
    "file": "models/vae", "vae_name": "models/vae",
}  # fmt: skip


@pytest.fixture(scope="module")
def checker():
    """checker(name, *arguments) -> the finished process. Skips where the checkers are not to be had."""
    if not all((BIN / name).exists() or (BIN / f"{name}.exe").exists() for name in CHECKERS):
        venv.create(HOME, clear=True, with_pip=True)
        pip = [BIN / "python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *CHECKERS]
        made = subprocess.run(pip, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"{' and '.join(CHECKERS)} cannot be installed here: {made.stderr.strip().splitlines()[-1]}")

    def run(name: str, *arguments: os.PathLike | str) -> subprocess.CompletedProcess:
        return subprocess.run([BIN / name, *arguments], capture_output=True, text=True, cwd=PACK, timeout=600)

    return run


@pytest.fixture(scope="module")
def stocked_host(host_path):
    """A host whose folders have a file under every name that a workflow asks for."""
    with HostServer(host_path) as host:
        for entry in (entry for name in NAMES for entry in api(name).values()):
            for key in FOLDERS.keys() & entry["inputs"].keys():
                if isinstance(name := entry["inputs"][key], str):
                    file = host.base / FOLDERS[key] / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch()
        yield host


@pytest.mark.parametrize("level", ["syntax", "javascript"])
def test_comfy_test_finds_nothing_in_the_whole_checkout(checker, level):
    ran = checker("comfy-test", "lint", "--check", level, PACK)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "PASSED" in ran.stdout


def test_comfy_lint_finds_nothing_in_the_workflows(checker, stocked_host):
    files = sorted((PACK / "workflows" / "api").glob("*.json"))
    ran = checker("comfy-lint", "--strict", "--server", stocked_host.url, *files)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert f"{len(files)} files clean" in ran.stdout


def test_a_name_that_is_in_no_list_is_found(checker, stocked_host, tmp_path):
    text = (PACK / "workflows" / "api" / "refine.json").read_text(encoding="utf-8")
    wrong = tmp_path / "refine.json"
    wrong.write_text(text.replace('"euler"', '"oiler"'), encoding="utf-8")
    ran = checker("comfy-lint", "--server", stocked_host.url, wrong)
    assert wrong.read_text(encoding="utf-8") != text and ran.returncode and "oiler" in ran.stdout
