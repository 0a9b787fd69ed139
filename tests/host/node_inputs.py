"""What a saved workflow relies on: the ids, order and types of every node's inputs and outputs, as committed.

node_inputs.json is the promise. `dev/write_node_inputs.py` writes it anew, but only where it has grown as it may.
"""

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


def of_nodes(object_info: dict, pack: str) -> dict:
    """{node: {"required": [[id, type]], "optional": [...], "outputs": [type]}} of the nodes of `pack`, in order."""
    return {
        name: {
            **{
                kind: [[key, spec[0] if isinstance(spec[0], str) else "COMBO"] for key, spec in inputs.items()]
                for kind in ("required", "optional")
                for inputs in [node["input"].get(kind, {})]
            },
            "outputs": list(node["output"]),
        }
        for name, node in sorted(object_info.items())
        if pack in node["python_module"]
    }


def broken_promises(promised: dict, now: dict) -> list[str]:
    """A line for each change but more nodes, and more optional inputs or outputs at the end of one."""
    broken = []
    for name, node in promised.items():
        if name not in now:
            broken.append(f"{name} is gone")
            continue
        if now[name]["required"] != node["required"]:
            broken.append(f"{name}: required inputs were {node['required']}, are {now[name]['required']}")
        for part in ("optional", "outputs"):
            if now[name][part][: len(node[part])] != node[part]:
                broken.append(f"{name}: {part} was {node[part]}, is {now[name][part]}")
    return broken


def promised() -> dict:
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(now: dict) -> None:
    nodes = [f" {json.dumps(name)}: {json.dumps(node)}" for name, node in now.items()]
    FILE.write_text("{\n" + ",\n".join(nodes) + "\n}\n", encoding="utf-8")
