"""Give each part of a model a dtype of its own, see what that does to it, and name the layer that made a NaN."""

from .audit import NODES as AUDIT_NODES
from .vae import NODES as VAE_NODES

__all__ = ["NODES"]

NODES = [*VAE_NODES, *AUDIT_NODES]
