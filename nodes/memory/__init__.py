"""Know the memory before it is used."""

from .attention import NODES as ATTENTION_NODES
from .model import NODES as MODEL_NODES
from .training import NODES as TRAINING_NODES

__all__ = ["NODES"]

NODES = [*ATTENTION_NODES, *MODEL_NODES, *TRAINING_NODES]
