"""Boots the real host inside this process, without its server, and loads the pack into it as the host would.

The host reads sys.argv while it is imported, so pytest never imports it. Scripts beside this one do, each run by a test
as a process of its own:

    python tests/host/SCRIPT.py HOST_FOLDER RESULT.json [check ...]

REF2V_HOST_FLAGS holds more of the host's command line, such as --bf16-vae.
"""

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

HOST, RESULT, WANTED = sys.argv[1], sys.argv[2], sys.argv[3:]
PACK = Path(__file__).resolve().parents[2]
WORK = tempfile.TemporaryDirectory(prefix="ref2v-")
sys.path.insert(0, HOST)
sys.argv = ["main.py", "--cpu", "--base-directory", WORK.name, *os.environ.get("REF2V_HOST_FLAGS", "").split()]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.sample  # noqa: E402
import comfy.samplers  # noqa: E402
import torch  # noqa: E402


def load_pack() -> str:
    """The pack under a module name that is a path, as the host does it; returns that name."""
    name = str(PACK).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return name


NAME = load_pack()


def pack(module: str):
    """A module of the pack, such as pack("nodes.host.paths")."""
    return importlib.import_module(f"{NAME}.{module}")


BadInput = pack("training.errors").BadInput


def error(a, b) -> float:
    """Relative error of a against b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def sample(model, conditioning, latent, *, steps=8, seed=1, noise=None, sampler="euler", scheduler="simple", **more):
    """What the host's KSampler node does."""
    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    if noise is None:
        noise = comfy.sample.prepare_noise(latent, seed)
    negative = more.pop("negative", conditioning)
    cfg = more.pop("cfg", 1.0)
    return comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler,
        scheduler,
        conditioning,
        negative,
        latent,
        seed=seed,
        disable_pbar=True,
        **more,
    )


def refusal(action) -> str:
    """The sentence that a person would read, or how else it ended."""
    try:
        action()
    except BadInput as refused:
        return str(refused)
    except Exception as failure:
        return f"NOT A SENTENCE: {type(failure).__name__}: {failure}"
    return "PASSED"


def write_results(checks: dict) -> None:
    """Run the wanted ones of {name: function} as the host runs its nodes, and write {name: what it returned}."""
    results = {}
    for name in WANTED or checks:
        try:
            with torch.inference_mode():
                torch.manual_seed(0)
                results[name] = checks[name]()
        except Exception:  # one broken check must not hide the others
            results[name] = {"failed": traceback.format_exc()}
    Path(RESULT).write_text(json.dumps(results, indent=1))
