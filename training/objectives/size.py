"""How large a network is, beside the base model that it stands next to."""

from __future__ import annotations

from dataclasses import dataclass

BASE_PARAMETERS = {
    # UNet alone, as counted on the meta device from each model's published configuration
    "SD1.5": 859_520_964,
    "SDXL": 2_567_463_684,
}


@dataclass(frozen=True)
class Size:
    parameters: int
    base: str | None
    base_parameters: int | None

    @property
    def ratio(self) -> float | None:
        """Refiner parameters / base parameters, or None where no base is named."""
        return None if not self.base_parameters else self.parameters / self.base_parameters

    def sentence(self) -> str:
        if self.ratio is None:
            return f"{self.parameters:,} parameters (no base model named, so no ratio)"
        return f"{self.parameters:,} parameters, {self.ratio:.1%} of {self.base} ({self.base_parameters:,})"
