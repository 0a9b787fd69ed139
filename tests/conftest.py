"""What every test sees: the repository on the path, behind everything else.

The root goes to the END of `sys.path`, because it holds a package called `nodes`, and the host a module of that name.
Appending keeps `training` and `tests` importable here without ever shadowing anything.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
