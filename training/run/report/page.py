"""report.png: a run on one page, to be read in a minute. Written when a run is done, and when it stopped or failed."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...storage.files import write_whole
from .charts import RunCharts
from .labels import MEASURES, duration, row_label
from .report import COLUMNS, machine_of, read_grid, to_pil

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset
    from ...objectives.evaluate import Evaluation
    from ..plan import Plan
    from .journal import Journal
    from .memory_log import MemoryLog

__all__ = ["PAGE", "RunPage"]

PAGE = "report.png"
_WIDTH = 16  # inches, at 100 dots each
_PAIRS, _TIMES = 3, 5  # held-out pairs, and times in the run at which they are shown
_COLUMNS = _TIMES + 2  # base and target beside them
_COLOURS = {"done": "tab:green", "stopped": "tab:orange", "failed": "tab:red"}
# The first of these that is installed says what the page's own font has no letters for: a run's name, a path
_OTHER_SCRIPTS = (
    "Noto Sans CJK SC",
    "Noto Serif CJK SC",
    "Microsoft YaHei",
    "PingFang SC",
    "SimHei",
    "Arial Unicode MS",
)


@dataclass
class RunPage:
    """What the page is drawn from. `times` is TimesHistogram.as_json as it is at that moment."""

    folder: Path
    config: TrainConfig
    plan: Plan
    data: RefinerDataset
    journal: Journal
    memory: MemoryLog

    def write(
        self, state: str, message: str, seconds: float, times: dict[str, Any], measured: Evaluation | None = None
    ) -> str:
        """Write report.png whole, or leave the one before.

        state: done, stopped or failed, with its sentence. seconds: of training, in all. Returns a sentence where the
        page could not be written: no picture is worth a run, so nothing is raised.
        """
        try:
            buffer = BytesIO()
            self.figure(state, message, seconds, times, measured).savefig(buffer, format="png")
            write_whole(self.folder / PAGE, buffer.getvalue())
        except Exception as error:  # whatever a drawing library meets
            return f"{PAGE} could not be written ({type(error).__name__}: {error}); the run itself is not affected."
        return ""

    def figure(
        self, state: str, message: str, seconds: float, times: dict[str, Any], measured: Evaluation | None
    ) -> Figure:
        """The page as a figure of matplotlib."""
        # the object interface: pyplot keeps every figure in a process-wide registry, which a long-lived host would leak
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        text, rows = self._text("" if state == "done" else message, seconds, measured), self._pictures(measured)
        lines = sum(line.count("\n") + 1 for line, _ in text)
        tall = [max(0.9 + 0.19 * lines, 3.0 if measured else 0), 6.9]
        if rows:
            tall.append(0.8 + sum(0.08 + _WIDTH * 0.96 / _COLUMNS * _aspect(row) for row in rows))
        height = sum(tall) + 0.1
        figure = Figure(figsize=(_WIDTH, height), dpi=100)  # matplotlib's own layouts would take twice the time
        FigureCanvasAgg(figure)
        ends = [sum(tall[:k]) for k in range(len(tall) + 1)]

        def band(k: int, left: float, above: float, below: float) -> dict[str, float]:
            """Where the k-th part is, with its margins in inches."""
            top, bottom = 1 - (ends[k] + above) / height, 1 - (ends[k + 1] - below) / height
            return {"left": left / _WIDTH, "right": 1 - 0.2 / _WIDTH, "top": top, "bottom": bottom}

        spec = figure.add_gridspec(1, 2, width_ratios=(1.8, 1), wspace=0.05, **band(0, 0.2, 0.45, 0.15))
        self._draw_text([figure.add_subplot(spec[0, k]) for k in range(2)], state, text, measured)
        spec = figure.add_gridspec(2, 4, wspace=0.26, hspace=0.36, **band(1, 0.7, 0.4, 0.6))
        charts = RunCharts(
            self.journal, self.memory, self.plan.objective.loss_of_nothing, self.config.optimizer.clip_norm, self._steps
        )
        charts.draw(figure, spec, times, measured)
        if rows:
            of = "Held-out pairs" if self.data.held_out else "Training pairs (none were held out)"
            title = f"{of} over the run: base | refined | target"
            figure.text(0.2 / _WIDTH, 1 - (ends[2] + 0.25) / height, title, fontsize=12, weight="bold")
            heights = [_aspect(row) for row in rows]
            place: dict[str, Any] = band(2, 0.2, 0.65, 0)
            spec = figure.add_gridspec(len(rows), _COLUMNS, wspace=0.05, hspace=0.05, height_ratios=heights, **place)
            _draw_pictures(figure, spec, rows)
        return figure

    # ---- text ------------------------------------------------------------------------------------------------------

    def _text(self, message: str, seconds: float, measured: Evaluation | None) -> list[tuple[str, bool]]:
        """Lines, wrapped, and whether each is a heading."""
        plan, data, config = self.plan, self.data, self.config
        machine = machine_of(plan)
        each = f", {seconds / self._steps:.3g} s a step" if self._steps else ""
        size = config.data.batch_size * config.data.accumulation
        facts = [message] if message else []
        facts += [
            f"{self._steps:,} of {plan.total_steps:,} steps ({_count(plan.epochs, 'epoch')}) of "
            f"{_count(size, 'pair')} in {duration(seconds)}{each}; {len(data.train):,} training pairs, "
            f"{len(data.held_out):,} held out",
            f"on {machine.get('gpu', machine['device'])}, {machine['processor']}, {machine['cores']} cores, "
            f"torch {machine['torch']}",
        ]
        if measured is not None and measured.rows:
            facts += _gains(measured)
        width = 105 if measured else 150
        lines = [("\n".join(textwrap.wrap(fact, width)), False) for fact in facts]
        lines.append(("What was chosen, and why", True))
        wrapped = (
            textwrap.wrap(choice, width, initial_indent="•  ", subsequent_indent="    ") for choice in plan.choices
        )
        return [*lines, *(("\n".join(choice), False) for choice in wrapped)]

    def _draw_text(self, axes, state: str, text: list[tuple[str, bool]], measured: Evaluation | None) -> None:
        family = _fonts()
        for each in axes:
            each.set_axis_off()
        title = f"{self.folder.name}: "
        axes[0].set_title(
            title + state, loc="left", fontsize=18, color=_COLOURS[state], family=family, parse_math=False
        )
        below = 1.0
        height = sum(line.count("\n") + 1 for line, _ in text) + 2
        for line, heading in text:
            below -= (0.6 if heading else 0) / height
            axes[0].text(
                0, below, line, va="top", fontsize=10.5, weight="bold" if heading else "normal", family=family,
                linespacing=1.25, parse_math=False, transform=axes[0].transAxes,
            )  # fmt: skip
            below -= (line.count("\n") + 1) / height
        if measured is not None and measured.rows:
            on = "held-out " if self.data.held_out else "training "
            _draw_table(axes[1], measured, f"Means over {_count(measured.count, on + 'pair')}")

    @property
    def _steps(self) -> int:
        """Finished ones."""
        return (self.journal.series("learning_rate")[0] or [0])[-1]

    # ---- pictures --------------------------------------------------------------------------------------------------

    def _pictures(self, measured: Evaluation | None) -> list[list[tuple[str, Any]]]:
        """For each of some held-out pairs (title, PIL picture): base, refined at a few steps, target."""
        files = {int(file.stem.removeprefix("step-")): file for file in (self.folder / "validation").glob("step-*.png")}
        # a run that was killed and went on from an earlier checkpoint may have pictures of what is still to come
        past = [(step, read_grid(file)) for step, file in sorted(files.items()) if step <= self._steps]
        shown = [(f"step {step:,}", rows) for step, rows in past if rows]
        if measured is not None and measured.pictures and (not shown or shown[-1][0] != f"step {self._steps:,}"):
            rows = [{name: to_pil(row[name]) for name in COLUMNS} for row in measured.pictures]
            shown.append(("at the end", rows))
        if not shown:
            return []
        most = min(_TIMES, len(shown))
        shown = [shown[round(k * (len(shown) - 1) / max(most - 1, 1))] for k in range(most)]
        pairs = min(_PAIRS, *(len(rows) for _, rows in shown))
        end = shown[-1][1]
        return [
            [
                ("base", end[k]["base"]),
                *((title, rows[k]["refined"]) for title, rows in shown),
                ("target", end[k]["target"]),
            ]
            for k in range(pairs)
        ]


# ---- what needs no run ----------------------------------------------------------------------------------------------


def _gains(measured: Evaluation) -> list[str]:
    """One sentence for what the refiner gains over the base in each measure."""
    base = measured.rows["base"]
    refined = {name: row for name, row in measured.rows.items() if name.endswith(("step", "steps"))}
    told = []
    for name in ("psnr", "spectrum") if "psnr" in base else ("relative_residual", "spectrum"):
        where = (max if MEASURES[name].more_is_better else min)(refined, key=lambda row: refined[row][name])
        told.append(f"{MEASURES[name].short} {base[name]:.2f} \u2192 {refined[where][name]:.2f} ({where})")
    return ["Base \u2192 refiner, each at its best number of sampling steps: " + "; ".join(told)]


def _draw_table(axes, measured: Evaluation, title: str) -> None:
    """The measures, the best of each column in bold."""
    names = list(next(iter(measured.rows.values())))
    axes.set_title(title, loc="left", fontsize=11, weight="bold")
    height = len(measured.rows) + 2.5
    lefts = [0.42 + 0.58 * (k + 1) / len(names) for k in range(len(names))]
    for name, left in zip(names, lefts, strict=True):
        head = MEASURES[name].short.replace(" ", "\n") + (", dB" if name == "psnr" else "")
        axes.text(left, 1 - 1.3 / height, head, ha="right", va="bottom", fontsize=9)
    best = {
        name: (max if MEASURES[name].more_is_better else min)(row[name] for row in measured.rows.values())
        for name in names
    }
    for k, (row, values) in enumerate(measured.rows.items()):
        below = 1 - (k + 2.2) / height
        axes.text(0, below, row_label(row), fontsize=10)
        for name, left in zip(names, lefts, strict=True):
            weight = "bold" if values[name] == best[name] else "normal"
            digits = 2 if name in ("psnr", "spectrum") else 3
            axes.text(left, below, f"{values[name]:.{digits}f}", ha="right", fontsize=10, weight=weight)
    axes.set(xlim=(0, 1), ylim=(0, 1))


def _draw_pictures(figure, spec, rows: list[list[tuple[str, Any]]]) -> None:
    for k, row in enumerate(rows):
        for column, (title, picture) in enumerate(row):
            place = figure.add_subplot(spec[k, column])
            place.imshow(picture)
            place.set_axis_off()
            if k == 0:
                place.set_title(title, fontsize=10)


def _aspect(row: list[tuple[str, Any]]) -> float:
    """Height over width of the tallest picture."""
    return max(picture.height / picture.width for _, picture in row)


def _fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *[name for name in _OTHER_SCRIPTS if name in there][:1]]


def _count(number: float, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
