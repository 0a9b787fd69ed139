"""The graph type of a precision plan: what Precision Audit gives and Precision Plan takes."""

from ..host.api import io

__all__ = ["PrecisionPlanType"]

PrecisionPlanType = io.Custom("REF2V_PRECISION_PLAN")
