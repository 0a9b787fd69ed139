"""What a setting of the optimizer can be, for its configuration and for the code that carries it out."""

from typing import Literal

__all__ = ["Moments", "Rounding", "RoundingChoice"]

Rounding = Literal["stochastic", "kahan", "master"]
RoundingChoice = Literal["auto", "stochastic", "kahan", "master"]
Moments = Literal["fp32", "bf16"]
