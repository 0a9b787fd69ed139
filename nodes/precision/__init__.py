"""Give each part of a model a dtype of its own, see what that does to it, and name the layer that made a NaN."""

from .guard import NODES as GUARD_NODES
from .vae import NODES as VAE_NODES

__all__ = ["NODES"]

NODES = [*VAE_NODES, *GUARD_NODES]
