"""What a setting can be, for its configuration and for the code that carries it out."""

from typing import Literal

__all__ = [
    "PRECISIONS_OF_AUTO", "Extension", "Loss", "Moments", "Precision", "PrecisionChoice", "Rounding", "RoundingChoice",
    "Schedule",
]

Precision = Literal["fp32", "bf16", "fp16", "pure_bf16"]
PrecisionChoice = Literal["fp32", "bf16", "fp16", "pure_bf16", "auto"]
PRECISIONS_OF_AUTO = ("fp32", "bf16")
Rounding = Literal["stochastic", "kahan", "master"]
RoundingChoice = Literal["auto", "stochastic", "kahan", "master"]
Moments = Literal["fp32", "bf16"]
Schedule = Literal["cosine", "linear", "constant"]
Loss = Literal["mse", "huber"]
Extension = Literal["refuse", "constant", "stretch"]
