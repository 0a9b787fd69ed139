"""The host's schema API, imported in this one place: a version of it that the host promises to keep.

`comfy_api.latest` changes from one host to the next; `comfy_api.v0_0_2` is the newest fixed one that every host from
0.3.75 on has. A host that has dropped it gives its latest instead.
"""

from __future__ import annotations

try:
    from comfy_api.v0_0_2 import ComfyExtension, io, ui
except ImportError:
    from comfy_api.latest import ComfyExtension, io, ui

__all__ = ["ComfyExtension", "io", "ui"]
