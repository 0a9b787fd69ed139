"""The charts of report.png: loss, gradient norm, learning rate, memory, and at which times the network was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .report import running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpec

    from ...objectives.evaluate import Evaluation
    from .journal import Journal
    from .memory_log import MemoryLog

__all__ = ["RunCharts", "chart_times"]

_FEW = 40  # points that are marked one by one


@dataclass
class RunCharts:
    """What they are drawn from. loss_of_nothing: of a network that predicts nothing; steps: finished ones."""

    journal: Journal
    memory: MemoryLog
    loss_of_nothing: float
    clip_norm: float
    steps: int

    def draw(self, figure: Figure, grid: GridSpec, times: dict[str, Any], measured: Evaluation | None) -> None:
        """Into `grid`, two rows of four. times: TimesHistogram.as_json; measured: of the end, if it was reached."""
        scaled = bool(self.journal.series("loss_scale")[0])
        self._draw_loss(figure.add_subplot(grid[0, :2]))
        _draw_loss_per_sigma(figure.add_subplot(grid[0, 2]), measured)
        chart_times(figure.add_subplot(grid[0, 3]), times)
        axes = figure.add_subplot(grid[1, 0])
        _line(axes, *self.journal.series("learning_rate"), "tab:green")
        axes.set(title="learning rate", ylim=(0, None))
        self._finish(axes, self.steps > 0, "no step was finished")
        self._draw_norm(figure.add_subplot(grid[1, 1]))
        self._draw_memory(figure.add_subplot(grid[1, 2:3] if scaled else grid[1, 2:]))
        if scaled:
            self._draw_scale(figure.add_subplot(grid[1, 3]))

    def _draw_loss(self, axes: Axes) -> None:
        steps, losses = self.journal.series("loss")
        smooth = running_mean(losses)
        axes.plot(steps, losses, "." if len(steps) <= _FEW else "-", color="tab:blue", alpha=0.3, linewidth=0.8,
                  label="each step")  # fmt: skip
        _line(axes, steps, smooth, "tab:blue", label="smoothed")
        top = [*smooth, *sorted(losses)[: max(1, int(0.99 * len(losses)))][-1:]]
        for name, colour, label in (
            ("validation/loss_unaveraged", "tab:red", "held-out, weights as they are"),
            ("validation/loss", "tab:orange", "held-out, averaged weights (EMA): what is saved"),
        ):
            at, values = self.journal.series(name)
            top += values
            if at:
                filled = colour if name == "validation/loss" else "none"  # where both are equal, both are seen
                axes.plot(at, values, "o", color=colour, markerfacecolor=filled, markersize=5, label=label)
        best = self.journal.best("validation/loss")
        if best is not None:
            axes.axvline(best, color="tab:orange", linewidth=1, linestyle=":", label=f"best: step {best:,}")
        axes.set_title(f"loss ({self.loss_of_nothing:.3g} = predicts nothing)")
        axes.set_ylim(0, 1.08 * max(top, default=1))
        above = sum(loss > axes.get_ylim()[1] for loss in losses)
        if above:
            axes.text(0.01, 0.97, f"{above} step{'s' if above > 1 else ''} above the chart, the highest at "
                      f"{max(losses):.3g}", va="top", fontsize=8, transform=axes.transAxes)  # fmt: skip
        self._finish(axes, bool(steps), "no step was finished")

    def _draw_norm(self, axes: Axes) -> None:
        from matplotlib.ticker import LogLocator

        steps, norms = self.journal.series("gradient_norm")
        _line(axes, steps, norms, "tab:purple", linewidth=0.8)
        clip = self.clip_norm
        clipped = sum(norm > clip for norm in norms)
        if norms and max(norms) > clip / 10:
            axes.axhline(clip, color="black", linestyle="--", linewidth=1,
                         label=f"clipped above ({clipped:,} of {len(norms):,} steps)")  # fmt: skip
        axes.set(title="gradient norm, before clipping")
        if norms and min(norms) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        self._finish(axes, bool(norms), "no finite gradient")

    def _draw_memory(self, axes: Axes) -> None:
        series = self.memory.series()
        most = max((max(values) for _, values in series.values()), default=0)
        unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
        for (label, (steps, values)), colour in zip(series.items(), ("tab:blue", "tab:cyan"), strict=False):
            _line(axes, steps, [value / unit for value in values], colour, label=label)
        axes.set(title="memory", ylabel=name, ylim=(0, 1.15 * most / unit or 1))
        self._finish(axes, bool(series), "nothing was measured")

    def _draw_scale(self, axes: Axes) -> None:
        steps, scales = self.journal.series("loss_scale")
        _line(axes, steps, scales, "tab:brown")
        stepped = set(self.journal.series("gradient_norm")[0])
        skipped = [(step, scale) for step, scale in zip(steps, scales, strict=True) if step not in stepped]
        if skipped:
            axes.plot(*zip(*skipped, strict=True), "x", color="tab:red", label=f"skipped steps: {len(skipped):,}")
        axes.set(title="loss scale (fp16)")
        axes.set_yscale("log", base=2)
        self._finish(axes, True)

    def _finish(self, axes: Axes, drawn: bool, otherwise: str = "") -> None:
        """A chart over the optimizer's steps."""
        axes.set(xlabel="optimizer step", xlim=(0, 1.03 * max(self.steps, 1)))
        locator: Any = axes.xaxis.get_major_locator()  # matplotlib gives a MaxNLocator, and says any
        locator.set_params(integer=True, nbins=6)
        _finish(axes, drawn, otherwise)


def _draw_loss_per_sigma(axes: Axes, measured: Evaluation | None) -> None:
    losses = measured.loss_per_sigma if measured is not None else {}
    _line(axes, [float(t) for t in losses], list(losses.values()), "tab:orange")
    axes.set(title="loss at each sigma, at the end", xlabel="sigma", xlim=(0, 1.05))
    axes.set_ylim(0, 1.08 * max(losses.values(), default=1))
    _finish(axes, bool(losses), "measured when the run is done")


def chart_times(axes: Axes, times: dict[str, Any]) -> None:
    """How many pairs were drawn at which times; times: TimesHistogram.as_json of the objective."""
    if timesteps := times.get("timesteps"):  # of SDXL's refiner: "0 to 9" -> pairs
        axes.bar(list(timesteps), list(timesteps.values()), color="tab:blue")
        axes.set(title="training times drawn", xlabel="timestep", ylabel="pairs")
        axes.set_xticks(axes.get_xticks()[:: max(1, len(timesteps) // 4)])
        _finish(axes, any(timesteps.values()), "none")
        return
    beside = {float(edge): count for edge, count in times.get("beside_them_up_to", {}).items()}
    on = {float(t): count for t, count in times.get("on_sigmas", {}).items()}
    width = 1 / max(len(beside), 1)
    if any(beside.values()):
        middles = [edge - width / 2 for edge in beside]
        axes.bar(middles, list(beside.values()), width=0.92 * width, color="tab:cyan", label="beside them")
    if any(on.values()):
        axes.bar(list(on), list(on.values()), width=0.014, color="tab:blue", label="on the sampler's sigmas")
    axes.set(title="training times drawn", xlabel="sigma", ylabel="pairs", xlim=(0, 1.03))
    if len(on) <= 10:
        axes.margins(y=0.25)
    _finish(axes, any(beside.values()) or any(on.values()), "none")


def _line(axes: Axes, steps, values, colour: str, **how: Any) -> None:
    marker = "o" if 0 < len(steps) <= _FEW else None  # a single point has no line
    axes.plot(steps, values, color=colour, marker=marker, markersize=3, **how)


def _finish(axes: Axes, drawn: bool, otherwise: str) -> None:
    axes.grid(alpha=0.3)
    axes.title.set_fontsize(11)
    if not drawn:
        axes.text(0.5, 0.5, otherwise, ha="center", va="center", color="gray", transform=axes.transAxes)
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
