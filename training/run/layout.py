"""Names of what is in a run's folder, for those who look into one without training (see run_folder.py)."""

from __future__ import annotations

__all__ = ["ADAPTERS", "CHECKPOINTS", "EARLIER_CHECKPOINTS", "REFINER"]

REFINER = "refiner.safetensors"
ADAPTERS = "lora.safetensors"
CHECKPOINTS, EARLIER_CHECKPOINTS = ".checkpoints", "checkpoints"
