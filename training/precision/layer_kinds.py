"""What kind of layer a module is, from its class and its place, so that an audit can say which kind loses most."""

from __future__ import annotations

import torch

__all__ = ["ATTENTION", "EMBEDDING", "NORM", "OTHER", "kind_of", "norm_eps"]

NORM, ATTENTION, EMBEDDING, OTHER = "norm", "attention", "embedding", ""
_EMBEDS = ("time_embed", "label_emb", "embedder", "time_in", "vector_in", "guidance_in", "time_embedding")
_EPS = ("eps", "variance_epsilon", "epsilon")


def kind_of(name: str, module: torch.nn.Module) -> str:
    """"norm", "attention", "embedding" or "" for the module of that name in a network."""
    family = type(module).__name__.lower()
    if "attn" in family or "attention" in family:
        return ATTENTION
    if norm_eps(module) is not None or "norm" in family:
        return NORM
    if isinstance(module, torch.nn.Embedding) or any(part in name for part in _EMBEDS):
        return EMBEDDING
    return OTHER


def norm_eps(module: torch.nn.Module) -> float | None:
    """The small number that a norm adds before it divides; None for what has none."""
    if any(True for _ in module.children()):
        return None
    values = (getattr(module, name, None) for name in _EPS)
    return next((float(eps) for eps in values if isinstance(eps, (int, float)) and eps > 0), None)
