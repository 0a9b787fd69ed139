"""python ComfyUI-Ref2V/training train --config FILE | export --run FOLDER --out FILE | estimate attention --size WxH

From any folder, with any Python: a portable build's ignores the current folder and PYTHONPATH. In the pack's folder
`python -m training` is the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

CALLED = "python -m training"
if not __package__:
    # Run by its path, this folder stands first in sys.path, where `import times` or `import names` would find our
    # modules. The pack's own folder takes its place, as `-m` has it; processes that we start get the same list.
    # abspath, for `python ..` has no name that could be a package's.
    here = Path(os.path.abspath(__file__)).parent
    CALLED = f"python {here}"
    sys.path[:] = [str(here.parent) if os.path.abspath(entry) == str(here) else entry for entry in sys.path]
    __package__ = here.name  # of the relative imports below

from .errors import BadInput, TrainingFailed  # noqa: E402
from .memory import commands as memory  # noqa: E402
from .run import commands as run  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 a sentence on stderr, 130 stopped by the user."""
    parser = argparse.ArgumentParser(prog=CALLED, description="The Ref2V training core, without ComfyUI.")
    commands = parser.add_subparsers(dest="command", required=True)
    for room in (run, memory):
        room.add_commands(commands)
    options = parser.parse_args(arguments)
    try:
        return options.execute(options)
    except (BadInput, TrainingFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
