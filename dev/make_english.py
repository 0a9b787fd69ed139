"""Writes locales/en/nodeDefs.json from the nodes themselves, so that English is said in one place: the schemas.

    .dev/venv/bin/python dev/make_english.py

It also writes tests/host/node_inputs.json, the inputs that saved workflows rely on, unless one of them has moved.
locales/zh/nodeDefs.json is written by people; tests/host/test_locales.py says what it lacks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from tests.host import node_inputs  # noqa: E402
from tests.host.server import PACK_NAME, HostServer  # noqa: E402

HOST = Path(os.environ.get("REF2V_HOST") or ROOT / ".dev" / "host" / "ComfyUI")
FILE = ROOT / "locales" / "en" / "nodeDefs.json"


SPECIAL = frozenset("{}@|")


def node_definitions(object_info: dict) -> dict:
    """The locale entries that say what /object_info says, for the nodes of this pack."""
    return {
        name: {
            "display_name": node["display_name"],
            "description": node["description"],
            "inputs": {
                key: {"name": key, "tooltip": spec[1]["tooltip"]}
                for kind in ("required", "optional")
                for key, spec in node["input"].get(kind, {}).items()
            },
            "outputs": {
                str(i): {"name": shown, "tooltip": tooltip}
                for i, (shown, tooltip) in enumerate(zip(node["output_name"], node["output_tooltips"], strict=True))
            },
        }
        for name, node in sorted(object_info.items())
        if PACK_NAME in node["python_module"]
    }


def english(entry: dict) -> dict:
    """What of it goes into the file: a text with a sign that has a meaning in the front end's messages stays out.

    Some front ends read it there, others show it as it is; what is not in the file, all show as the node says it.
    """
    kept = {key: english(value) if isinstance(value, dict) else value for key, value in entry.items()}
    return {key: value for key, value in kept.items() if isinstance(value, dict) or not SPECIAL & set(value)}


if __name__ == "__main__":
    with HostServer(HOST) as host:
        said = host.object_info()
    definitions = english(node_definitions(said))
    inputs = node_inputs.of_nodes(said, PACK_NAME)
    if node_inputs.FILE.exists() and (broken := node_inputs.broken_promises(node_inputs.promised(), inputs)):
        sys.exit("Saved workflows would read wrongly; inputs grow at the end, optional:\n" + "\n".join(broken))
    node_inputs.write(inputs)
    FILE.write_text(json.dumps(definitions, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{FILE}: {len(definitions)} nodes")
