"""What a person sees in the graph: a node is a schema, a docstring and one call."""

from __future__ import annotations

from . import base_source, dataset, memory, precision, refiner, training_options
from .host.api import ComfyExtension, io
from .host.paths import register_model_folder

__all__ = ["comfy_entrypoint"]


class Ref2VExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        training = [*base_source.NODES, *dataset.NODES, *refiner.NODES, *training_options.NODES]
        return [*training, *precision.NODES, *memory.NODES]


def comfy_entrypoint() -> Ref2VExtension:
    """Called once by the host while it loads the pack."""
    register_model_folder()
    return Ref2VExtension()
