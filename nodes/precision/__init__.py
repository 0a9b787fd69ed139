"""Give each part of a model a dtype of its own, see what that does to it, and name the layer that made a NaN."""

from .audit import NODES as AUDIT_NODES
from .clip import NODES as CLIP_NODES
from .guard import NODES as GUARD_NODES
from .model import NODES as MODEL_NODES
from .plan import NODES as PLAN_NODES
from .vae import NODES as VAE_NODES

__all__ = ["NODES"]

NODES = [*VAE_NODES, *CLIP_NODES, *MODEL_NODES, *PLAN_NODES, *AUDIT_NODES, *GUARD_NODES]
