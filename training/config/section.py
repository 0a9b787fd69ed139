"""What every section of a run's configuration refuses, whatever its fields are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

__all__ = ["PlainPath", "Section"]

MOST = 2**63


def _without_zero_byte(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("must be a path, and no path holds a zero byte")
    return path


PlainPath = Annotated[Path, AfterValidator(_without_zero_byte)]


class Section(BaseModel):
    """Fields of one kind. No number of theirs is infinite, no number at all, or too large to be meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_a_number_one_can_mean(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or info.field_name == "shape":  # sections look at their own fields
            for number in _numbers_in(value):
                if isinstance(number, float) and not math.isfinite(number):
                    raise ValueError("must be a finite number")
                if abs(number) >= MOST:
                    raise ValueError(f"must be a number below 2^63, got one of {_digits(number)} digits")
        return value


def _numbers_in(value: Any) -> list[int | float]:
    """Those in it, however deep they lie in lists and dictionaries."""
    if isinstance(value, (list, tuple, dict)):
        return [number for one in (value.values() if isinstance(value, dict) else value) for number in _numbers_in(one)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def _digits(number: int | float) -> int:
    """Of its whole part, about; str() refuses those of more than 4,300."""
    return int(int(abs(number)).bit_length() * math.log10(2)) + 1
