"""ComfyUI-Ref2V: the entry point that ComfyUI looks for."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
