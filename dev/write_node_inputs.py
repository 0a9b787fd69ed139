"""Writes tests/host/node_inputs.json, the inputs that saved workflows rely on, unless one of them has moved.

    .dev/venv/bin/python dev/write_node_inputs.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.host import node_inputs  # noqa: E402
from tests.host.server import PACK_NAME, HostServer  # noqa: E402

HOST = Path(os.environ.get("REF2V_HOST") or ROOT / ".dev" / "host" / "ComfyUI")


if __name__ == "__main__":
    with HostServer(HOST) as host:
        inputs = node_inputs.of_nodes(host.object_info(), PACK_NAME)
    if node_inputs.FILE.exists() and (broken := node_inputs.broken_promises(node_inputs.promised(), inputs)):
        sys.exit("Saved workflows would read wrongly; inputs grow at the end, optional:\n" + "\n".join(broken))
    node_inputs.write(inputs)
    print(f"{node_inputs.FILE}: {len(inputs)} nodes")
