"""What an audit found, as Markdown: verdicts first, then a table for each part, then the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .assessment import NOTICED, ROUNDING_STEPS, SEEN, findings
from .audit import Audit, Layer
from .measures import Errors
from .plan import PrecisionPlan

__all__ = ["AuditPart", "layer_table", "report"]

WORST = 12  # layers in a table
_MOST_FINDINGS = 20


@dataclass
class AuditPart:
    """One part that was run: "VAE decoder", "clip_l", "model at sigma 0.5". sentences: what its errors mean, one a
    dtype.
    """

    name: str
    audit: Audit
    sentences: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[Layer]:
        return list(self.audit.layers.values())


def report(title: str, notes: list[str], parts: list[AuditPart], plan: PrecisionPlan) -> str:
    """The whole text. `notes`: what was run, and what a reader must know about it."""
    lines = [title, "", *(f"- {note}" for note in notes), "", "**Verdict**", ""]
    lines += [f"- {part.name}: {sentence}" for part in parts for sentence in part.sentences]
    lines += [
        "",
        f"Not visible: one pixel in a hundred at most is {NOTICED:g} or more in CIEDE2000, below which an observer "
        f"notices nothing; from {SEEN:g} on everybody does (Mokrzycki & Tatol 2011). Rounding to 8 bits alone costs "
        f"58.9 dB.",
    ]
    for part in parts:
        lines += ["", f"**{part.name}**: {len(part.layers)} modules ran", "", *_finding_lines(part)]
        if part.layers:
            lines += ["", *layer_table(part)]
    lines += ["", "**Plan**", "", *_plan_lines(plan)]
    return "\n".join(lines)


def _finding_lines(part: AuditPart) -> list[str]:
    lines = [f"- {layer.name}: {clause}" for layer in part.layers for clause in findings(layer, part.audit.names)]
    if not lines:
        return [f"No layer loses more than {ROUNDING_STEPS} steps of its dtype, overflows or loses its eps."]
    more = len(lines) - _MOST_FINDINGS
    return lines[:_MOST_FINDINGS] + ([f"- and {more} more"] if more > 0 else [])


def layer_table(part: AuditPart) -> list[str]:
    """The outermost modules, then the layers that lose most by themselves, in the order in which they ran."""
    names = part.audit.names
    shown = {layer.name for layer in _outermost(part.layers)}
    own = [layer for layer in part.layers if layer.own]
    shown |= {layer.name for layer in sorted(own, key=_worst, reverse=True)[:WORST]}
    head = ["layer", "kind", "calls", "max", "of fp16's range", "overflow", "to zero"]
    for name in names:
        head += [f"{name} own", f"{name} so far", f"{name} cosine", f"{name} largest"]
    rows = [_row(head), _row(["---", "---", *("---:" for _ in head[2:])])]
    for layer in part.layers:
        if layer.name in shown:
            rows.append(_row([*_about(layer), *(cell for name in names for cell in _errors(layer, name))]))
    rest = len(part.layers) - len(shown)
    return [*rows, *(["", f"{rest} more are in the chart only."] if rest > 0 else [])]


def _outermost(layers: list[Layer]) -> list[Layer]:
    """Those of the highest level at which there are more than a few: the network's parts, not its insides."""
    for level in range(max((layer.level for layer in layers), default=0) + 1):
        outer = [layer for layer in layers if layer.level <= level]
        if len(outer) > 2:
            return outer[:WORST]
    return layers[:WORST]


def _worst(layer: Layer) -> float:
    return max((errors.relative for errors in layer.own.values()), default=0.0)


def _about(layer: Layer) -> list[str]:
    kind = layer.kind or ("" if layer.innermost else "block")
    to_zero = f"{layer.lost / layer.values:.1%}" if layer.lost else "0"
    return [
        layer.name or "(all)", kind, str(layer.calls), f"{layer.largest:.3g}", f"{layer.range_used():.2%}",
        str(layer.over), to_zero,
    ]  # fmt: skip


def _errors(layer: Layer, name: str) -> list[str]:
    own, so_far = layer.own.get(name), layer.so_far.get(name)
    own_text = "fails" if name in layer.problems else _number(own)
    if so_far is None:
        return [own_text, "", "", ""]
    return [own_text, _number(so_far), f"{so_far.cosine:.5f}", f"{so_far.largest:.2g}"]


def _number(errors: Errors | None) -> str:
    if errors is None:
        return ""
    return "NaN" if math.isinf(errors.relative) and errors.not_finite else f"{errors.relative:.1e}"


def _plan_lines(plan: PrecisionPlan) -> list[str]:
    chosen = {"model": f"{plan.model_compute} compute, {plan.model_storage} storage"}
    chosen |= {name: f"{storage} storage, {compute} compute" for name, (storage, compute) in plan.clip.items()}
    chosen |= {"VAE encoder": plan.vae_encoder, "VAE decoder": plan.vae_decoder}
    lines = [f"- {part}: {chosen.get(part, '')} ({why})" for part, why in plan.reasons.items() if part in chosen]
    if plan.keep:
        lines.append(f"- kept in FP32: {', '.join(plan.keep)} ({plan.reasons.get('keep', '')})")
    return lines or ["Nothing was measured that a plan could be made of."]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
