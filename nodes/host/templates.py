"""The folder of workflows in the host's template browser: found by its name, and with its pictures.

The host lists `*/example_workflows/*.json` of all packs, and the same of four other names, one of them `workflows`. A
folder of each name would put every workflow into the list twice, and a link from one to the other does not outlive a
zip file on Windows. So there is the one folder, and a host that knew only the documented name is told ours.

Newer hosts serve nothing but `.json` from it, while their front ends ask for the picture at the same place.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["FOLDER", "be_found", "serve_thumbnails"]

FOLDER = "workflows"
_PACK = Path(__file__).parents[2]  # not resolved: the host knows a linked pack by the name of the link


def be_found() -> None:
    """See to it that the host looks for workflows in a folder of our name."""
    names = getattr(sys.modules.get("app.custom_node_manager"), "EXAMPLE_WORKFLOW_FOLDER_NAMES", None)
    if isinstance(names, list) and FOLDER not in names:
        names.append(FOLDER)


def serve_thumbnails() -> None:
    """Answer for workflows/NAME.jpg where the front end asks for it. To be called while the host loads the pack."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is None or set("{}") & set(_PACK.name):  # no server in a test; braces mean something else in a route
        return
    from aiohttp import web

    @server.routes.get(f"/workflow_templates/{_PACK.name}/{{name:[A-Za-z0-9_-]+}}.jpg")
    async def thumbnail(request: web.Request) -> web.StreamResponse:
        picture = _PACK / FOLDER / f"{request.match_info['name']}.jpg"
        if not picture.is_file():
            raise web.HTTPNotFound()
        return web.FileResponse(picture)
