"""With what `pip install -r requirements.txt` brings and nothing else; and beside packages that are broken.

The packages are the real ones: a folder of links to those that are wanted is all that the new process sees.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def closure(names: list[str]) -> set[str]:
    """The distributions that are installed with these, all the way down."""
    found: set[str] = set()
    queue = [Requirement(name) for name in names]
    while queue:
        wanted = queue.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in found or wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found.add(name)
        try:
            queue += [Requirement(line) for line in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            assert wanted.marker, f"{name} is not installed"  # for another system
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with links to the packages of requirements.txt and to all that these need."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = closure([line for raw in lines if (line := raw.partition("#")[0].strip())])
    assert {"torch", "diffusers", "numpy"} <= names and not {"peft", "tensorboard", "scikit-image"} & names
    folder = tmp_path_factory.mktemp("plain")
    for name in names:
        try:
            files = metadata.distribution(name).files or []
        except metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return folder


def run(code: str, *folders: Path, **environment: str) -> str:
    """What a new Python prints that sees these folders, the standard library and the core."""
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}"],
        capture_output=True, text=True, encoding="utf-8", timeout=240, cwd=folders[0],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONUTF8": "1", **environment},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_run_is_whole_without_any_of_the_extras(plain, configure, environment, tmp_path):
    config = configure()
    (tmp_path / "run.json").write_text(config.to_json())
    code = f"""
from training.__main__ import main
assert main(["train", "--config", {str(tmp_path / "run.json")!r}]) == 0
from training.config.sections import LoRAConfig
from training.objectives.residual.lora import choose_adapters
from training.config.network import UNetConfig
shape = UNetConfig(latent_channels=3, block_channels=[32], transformer_depth=[0], middle_depth=0, heads=[1])
try: choose_adapters(LoRAConfig(rank=2), shape)
except ValueError as error: print("LoRA said:", error)
extras = {{"tensorboard", "peft", "skimage", "imagehash"}}
print("brought:", {{name.partition(".")[0] for name in sys.modules}} & extras)
"""
    out = run(code, plain, OMP_NUM_THREADS="1")
    assert "No files for TensorBoard: the package tensorboard is not installed." in out
    lines = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((config.run / "report.json").read_text())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, report["training"]["steps"] + 1))
    assert report["evaluation"]["measures"]["base"]["ssim"] and (config.run / "report.png").is_file()
    assert not (config.run / "tensorboard").exists()
    assert "LoRA said: LoRA needs the package peft, which is not installed: `python -m pip install peft`" in out
    assert "brought: set()" in out


BREAK = {
    # name -> who imports it, and what it does where it was built for another torch
    "xformers": ("diffusers", "raise OSError('libtorch_cuda.so: undefined symbol: _ZN3c10')"),
    "bitsandbytes": ("diffusers", "import torch\ntorch.ops.load_library('/nowhere/libbitsandbytes.so')"),
}


@pytest.mark.parametrize("broken", BREAK)
def test_a_broken_package_of_others_is_named_in_one_sentence(tmp_path, broken):
    asked, code = BREAK[broken]
    (tmp_path / broken).mkdir()
    (tmp_path / broken / "__init__.py").write_text(code + "\n")
    (tmp_path / f"{broken}-0.46.0.dist-info").mkdir()
    (tmp_path / f"{broken}-0.46.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {broken}\nVersion: 0.46.0\n"
    )
    code = """
import training.run.train, training.memory.model_estimate  # what the host imports at its start
from training.config.sections import LoRAConfig
from training.objectives.residual.lora import add_adapters, choose_adapters
from training.config.network import UNetConfig
from training.objectives.residual.unet import build_unet
shape = UNetConfig(latent_channels=3, block_channels=[32], transformer_depth=[0], middle_depth=0, heads=[1])
try: add_adapters(build_unet(shape), choose_adapters(LoRAConfig(rank=2), shape))
except ValueError as error: print(type(error).__name__, error)
"""
    said = run(code, tmp_path, Path(sysconfig.get_path("purelib"))).strip()
    assert said.startswith("BadInput ") and "\n" not in said, said
    assert f"needs the package {asked}, which imports {broken}, and {broken} is broken" in said
    assert f"install {broken} anew, or remove it" in said


def test_a_broken_tensorboard_is_said_and_the_run_goes_on(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text("raise TypeError('Descriptors cannot be created')\n")
    code = f"""
from pathlib import Path
from training.run.report.journal import Journal, read
journal = Journal(Path({str(tmp_path)!r}), 0)
journal.write(1, loss=0.5)
journal.close()
print(journal.without_board, read(journal.path))
"""
    said = run(code, tmp_path, Path(sysconfig.get_path("purelib")))
    assert "the package tensorboard is broken (TypeError: Descriptors cannot be created" in said
    assert "{'step': 1, 'loss': 0.5}" in said
