"""What every test sees: the repository on the path, behind everything else.

The root goes to the END of `sys.path`, because it holds a package called `nodes`, and the host a module of that name.
Appending keeps `training` and `tests` importable here without ever shadowing anything.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def pytest_configure(config):
    """The same examples every time, so that a commit is judged alike; `dev.py test --full` looks for new ones."""
    settings.register_profile("the same examples", derandomize=True)
    if config.getoption("markexpr"):
        settings.load_profile("the same examples")
    if "REF2V_CACHE" not in os.environ:  # runs of the tests leave nothing in the user's cache
        os.environ["REF2V_CACHE"] = config.ref2v_cache = tempfile.mkdtemp(prefix="ref2v-cache-")


def pytest_unconfigure(config):
    if hasattr(config, "ref2v_cache"):
        shutil.rmtree(os.environ.pop("REF2V_CACHE"), ignore_errors=True)
