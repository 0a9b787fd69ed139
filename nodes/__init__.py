"""What a person sees in the graph: a node is a schema, a docstring and one call."""

from __future__ import annotations

import importlib
import logging

from .host.api import OLDEST_HOST, ComfyExtension, host_version, io, is_too_old, lacking

__all__ = ["comfy_entrypoint"]

_LOG = logging.getLogger("ref2v")
_FAMILIES = (
    "base_source", "dataset", "refiner", "training_options",
    "precision.vae", "precision.clip", "precision.model", "precision.plan", "precision.audit", "precision.guard",
    "memory.attention", "memory.model", "memory.training",
)  # fmt: skip


def load_nodes() -> list[type[io.ComfyNode]]:
    """All nodes that this host can hold. One line in its log for each family or node that it cannot, with the reason.

    A family is a file of nodes. What its nodes need only to run is imported as they run (`host/api.py`, `loading`).
    """
    nodes = []
    for family in _FAMILIES:
        try:
            found = importlib.import_module(f".{family}", __name__).NODES
        except Exception as problem:  # whatever a host has changed, the other families stay
            _left_out(f"the nodes of {family}", problem)
            continue
        for node in found:
            try:
                node.GET_SCHEMA()  # as the host does next, where a failure would end the whole list
            except Exception as problem:
                _left_out(f"the node {node.__name__}", problem)
            else:
                nodes.append(node)
    return nodes


def _left_out(what: str, problem: Exception) -> None:
    _LOG.error(f"Ref2V goes without {what}, which this ComfyUI ({host_version()}) cannot load: {lacking(problem)}")


class Ref2VExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return load_nodes()


def comfy_entrypoint() -> Ref2VExtension:
    """Called once by the host while it loads the pack."""
    if is_too_old(version := host_version()):
        _LOG.warning(f"Ref2V is made for ComfyUI {OLDEST_HOST} or newer, and this is {version}: some of it may fail.")
    try:
        from .host.paths import register_model_folder

        register_model_folder()
    except Exception as problem:
        _left_out("its folder of refiners", problem)
    try:
        from .host.templates import be_found, serve_thumbnails

        be_found()
        serve_thumbnails()
    except Exception as problem:
        _left_out("the pictures of its workflows", problem)
    return Ref2VExtension()
