"""The training folder run by its path: from any folder, by a Python that ignores where it is started."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACK = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """The core alone in a pack's folder of its own, with a space and Chinese in its path, through a link."""
    folder = tmp_path_factory.mktemp("a pack") / "\u6587\u4ef6\u5939"
    shutil.copytree(PACK / "training", folder / "ComfyUI-Ref2V" / "training", ignore=shutil.ignore_patterns("__pyc*"))
    # another package of that name, as a portable build's Python could have one
    (folder / "site" / "training").mkdir(parents=True)
    (folder / "site" / "training" / "__init__.py").write_text("raise ImportError('the wrong package')")
    if os.name == "nt":
        return folder / "ComfyUI-Ref2V"
    (folder / "link").symlink_to("ComfyUI-Ref2V", target_is_directory=True)
    return folder / "link"


# `python FOLDER ...` as it is, but new processes are spawned, as on Windows and macOS, and import the core by its name.
SPAWNING = """
import multiprocessing, runpy, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.path
@pytest.mark.parametrize("how", [["-I"], ["-I", "-c", SPAWNING]], ids=["isolated", "spawned"])
def test_a_run_with_worker_processes_starts_from_any_folder(elsewhere, configure, environment, tmp_path, how):
    config = tmp_path / "run.json"
    config.write_text(configure(data__workers=1, validation__pictures=0, epochs=1).to_json())
    here = tmp_path / "somewhere else"
    here.mkdir()
    ran = subprocess.run(
        [sys.executable, *how, str(elsewhere / "training"), "train", "--config", str(config)],
        cwd=here, capture_output=True, text=True, encoding="utf-8", timeout=240,
        env={**environment, "PYTHONPATH": str(elsewhere.parent / "site"), "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads((configure().run / "status.json").read_text(encoding="utf-8"))["state"] == "done"
    assert Path(ran.stdout.strip().splitlines()[-1]) == configure().run / "refiner.safetensors"


@pytest.mark.parametrize("inside, path", [("training/data", ".."), ("training", "."), ("training", "../training")])
def test_the_path_may_be_written_in_dots(elsewhere, inside, path):
    ran = subprocess.run(
        [sys.executable, "-I", path, "export", "--run", "nowhere", "--out", "x.safetensors"], cwd=elsewhere / inside,
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert ran.returncode == 1 and "expected the folder of a run" in ran.stderr, ran.stderr


def test_no_module_of_the_core_stands_for_a_package_of_others(elsewhere):
    """Run by its path, the folder itself is first in sys.path; `import times` must not find the core's."""
    code = "import importlib.util, runpy, sys\ndel sys.argv[0]\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print([name for name in ('times', 'names', 'report', 'config') if importlib.util.find_spec(name)])"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code, str(elsewhere / "training"), "--help"],
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "usage: python" in ran.stdout and ran.stdout.splitlines()[-1] == "[]"
