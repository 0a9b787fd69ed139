"""Makes workflows/NAME.json (UI format) and its thumbnail from workflows/api/NAME.json and dev/*_layouts.py.

    .dev/venv/bin/python dev/make_workflows.py [NAME ...]

The real front end does it, in Chromium: it loads the API file, places the nodes, adds groups and notes, and writes both
files as its own "Save" and "Export (API)" would. Run it after a node has got another input, or to add a workflow.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import model_layouts  # noqa: E402  beside this file: `dev` itself is dev.py
import refiner_layouts  # noqa: E402
from layout import Layout  # noqa: E402

from tests.host.browser import front_end  # noqa: E402
from tests.host.server import HostServer  # noqa: E402

LAYOUTS = {**refiner_layouts.LAYOUTS, **model_layouts.LAYOUTS}
WORKFLOWS = ROOT / "workflows"
HOST = Path(os.environ.get("REF2V_HOST") or ROOT / ".dev" / "host" / "ComfyUI")
THUMBNAIL = (800, 600)

# Loads an API file and lays it out. Returns what "Save" and "Export (API)" give.
BUILD = """
async ({name, api, layout}) => {
    await app.loadApiJson(structuredClone(api), name)
    const graph = app.graph
    const GAP = 40, MARGIN = 20, TITLE = 70, WIDTH = 330
    for (const node of graph.nodes)  // queued twice must be the same twice
        for (const widget of node.widgets ?? [])
            if (widget.name === 'control_after_generate') widget.value = 'fixed'

    let top = 0
    for (const row of layout.rows) {
        let left = 0, bottom = top
        for (const [title, columns] of row) {
            const start = left
            left += MARGIN
            let lowest = top
            for (const column of columns) {
                let y = top + TITLE, width = 0
                for (const item of column) {
                    let node
                    if (item.note) {
                        node = LiteGraph.createNode('MarkdownNote')
                        graph.add(node)
                        node.widgets[0].value = item.note
                        node.title = item.title
                        node.color = '#432', node.bgcolor = '#653'
                    } else {
                        node = graph.getNodeById(item.id)
                    }
                    const least = node.computeSize()
                    node.pos = [left, y + LiteGraph.NODE_TITLE_HEIGHT]
                    node.setSize([item.width ?? Math.max(least[0], WIDTH), item.height ?? least[1]])
                    if (item.collapsed) node.collapse()
                    y += (item.collapsed ? 0 : node.size[1]) + LiteGraph.NODE_TITLE_HEIGHT + GAP / 2
                    width = Math.max(width, node.size[0])
                }
                left += width + GAP
                lowest = Math.max(lowest, y)
            }
            left += MARGIN - GAP
            const group = new LiteGraph.LGraphGroup(title)
            group.pos = [start, top]
            group.size = [left - start, lowest - top + MARGIN / 2]
            graph.add(group)
            left += GAP
            bottom = Math.max(bottom, lowest)
        }
        top = bottom + GAP * 1.5
    }
    app.canvas.ds.scale = 0.7
    app.canvas.ds.offset = [110, 190]  // what a person sees first: all that the side bar and the tabs leave free
    graph.setDirtyCanvas(true, true)
    const {output, workflow} = await app.graphToPrompt()
    return JSON.stringify({output, workflow})  // as the front end writes it: without what is undefined
}
"""

FIT = """
(margin) => {
    const boxes = app.graph.groups.map(group => group.boundingRect ?? group._bounding)
    const x0 = Math.min(...boxes.map(b => b[0])), y0 = Math.min(...boxes.map(b => b[1]))
    const x1 = Math.max(...boxes.map(b => b[0] + b[2])), y1 = Math.max(...boxes.map(b => b[1] + b[3]))
    const element = app.canvas.canvas
    const width = element.clientWidth - 2 * margin, height = element.clientHeight - 2 * margin
    app.canvas.ds.scale = Math.min(width / (x1 - x0), height / (y1 - y0), 1)
    const scale = app.canvas.ds.scale
    app.canvas.ds.offset = [
        (margin + (width - (x1 - x0) * scale) / 2) / scale - x0,
        (margin + (height - (y1 - y0) * scale) / 2) / scale - y0,
    ]
    app.graph.setDirtyCanvas(true, true)
    const [left, top] = [x0, y0].map((at, i) => (at + app.canvas.ds.offset[i]) * scale)
    return {x: left, y: top, width: (x1 - x0) * scale, height: (y1 - y0) * scale}
}
"""


def as_data(layout: Layout) -> dict:
    """The layout as plain lists for the page: rows of [title, columns of items]."""
    rows = []
    for row in layout:
        rows.append([[group.title, [[item.as_data() for item in column] for column in group.columns]] for group in row])
    return {"rows": rows}


def stable(workflow: dict, name: str) -> dict:
    """The workflow without what differs from one run of the front end to the next."""
    workflow = {**workflow, "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"ref2v/{name}")), "revision": 0}
    workflow["extra"] = {"ds": workflow["extra"]["ds"]}
    for node in workflow["nodes"]:
        # where a newer front end looks for a pack that is missing; the version is the user's own business
        node["properties"] = {k: v for k, v in node["properties"].items() if k not in ("ver", "cnr_id", "aux_id")}
        node["pos"] = [round(value) for value in node["pos"]]
        node["size"] = [round(value) for value in node["size"]]
    return workflow


def write_json(path: Path, data: dict):
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(page, name: str):
    """Write both files and the thumbnail of one workflow."""
    from PIL import Image

    api = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    made = json.loads(page.evaluate(BUILD, {"name": name, "api": api, "layout": as_data(LAYOUTS[name])}))
    exported = dict(sorted(made["output"].items(), key=lambda entry: int(entry[0])))
    write_json(WORKFLOWS / "api" / f"{name}.json", exported)
    write_json(WORKFLOWS / f"{name}.json", stable(made["workflow"], name))

    page.set_viewport_size({"width": 2560, "height": 1600})  # on a smaller one, titles and values are left out
    page.wait_for_timeout(300)
    place = page.evaluate(FIT, 12)
    page.wait_for_timeout(1000)
    shot = Image.open(BytesIO(page.screenshot(clip=place))).convert("RGB")
    shot.thumbnail(THUMBNAIL)
    shot.save(WORKFLOWS / f"{name}.jpg", quality=85, optimize=True)
    print(f"{name}: {len(exported)} nodes", flush=True)


def main(names: list[str]):
    with HostServer(HOST) as host:
        host.post("/settings", {"Comfy.Graph.CanvasMenu": False})
        with front_end(host) as page:
            page.evaluate("() => { app.extensionManager.focusMode = true; app.canvas.show_info = false }")
            for name in names or sorted(LAYOUTS):
                make(page, name)


if __name__ == "__main__":
    main(sys.argv[1:])
