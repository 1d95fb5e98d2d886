"""A report on outliers in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .ranking import Ranking, SampleScore
from .subset_scores import SubsetScore

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

__all__ = ["losses_of", "number", "summary", "tables"]

TOP = 15
LEAST = 12
"""The fewest letters of a description that are shown if there is room for them."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A text on one line, cut to the room that there is: rich would cut the whole table for a column that does not wrap."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(self.text.partition("\n")[0])
        line.truncate(options.max_width, overflow="ellipsis")
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = cell_len(self.text)
        return Measurement(min(LEAST, length), min(length, options.max_width))


def tables(report: Ranking, *, most: int = TOP, describe: Callable[[int], str] | None = None) -> Iterator[RenderableType]:
    """The summary, the highest ranked samples and the subsets. ``describe(index)`` adds a line to each sample."""
    yield Text("\n".join(summary(report)))
    yield _samples(report.top(most), losses_of(report), describe)
    if report.subsets:
        yield _subsets(report.subsets[:most])


def summary(report: Ranking) -> list[str]:
    """A few lines about what was read, selected, spent and skipped."""
    selection = report.selection
    rate = f"{100 * selection.noise_rate:.1f} % ({'estimated' if selection.is_estimated else 'given'})"
    lines = [
        f"{int(selection.suspects.sum())} suspects among {len(report)} samples, at a noise rate of {rate}",
        f"read: {_read(report)}",
        f"cost: {report.cost}",
    ]
    if all(source.held_out is None for source in report.sources) and len(report.sources) < 2:
        lines.append("one branch only, so there is no spread: another seed would tell how sure the ranks are")
    lines += [
        f"skipped: {skipped.branch}{'' if skipped.step is None else f', step {skipped.step}'}: {skipped.reason}"
        for skipped in report.skipped
    ]
    return lines


def number(value: float | None, digits: int = 2) -> str:
    """The number as text; a dash if it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def _read(report: Ranking) -> str:
    parts = []
    for kind, held in (("along the lineage", False), ("of variants that held samples out", True)):
        sources = [source for source in report.sources if (source.held_out is not None) is held]
        if sources:
            states, of = sum(len(source.states) for source in sources), sum(source.of for source in sources)
            parts.append(f"{states} of {of} states {kind} ({len(sources)} {'branch' if len(sources) == 1 else 'branches'})")
    gone = sum(source.gone for source in report.sources)
    return ", ".join(parts) + (f"; {gone} have no bytes any more" if gone else "")


def losses_of(report: Ranking) -> list[tuple[str, str]]:
    """The kinds of loss that the report has, each as a heading and a field of a sample."""
    held = any(source.held_out is not None for source in report.sources)
    along = any(source.held_out is None for source in report.sources)
    return [*([("lineage loss", "lineage_loss")] if along else []), *([("held-out loss", "held_out_loss")] if held else [])]


def _samples(samples: Sequence[SampleScore], losses: Sequence[tuple[str, str]], describe: Callable[[int], str] | None) -> Table:
    table = Table(title="Most suspicious samples", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in ("rank", "sample", "percentile", "± spread", *(heading for heading, _ in losses), "suspect"):
        table.add_column(name.replace(" ", "\n"), justify="right")
    if describe is not None:
        table.add_column("what")
    for sample in samples:
        values = (number(getattr(sample, field)) for _, field in losses)
        what = [] if describe is None else [_Line(describe(sample.index))]
        row = (str(sample.rank), str(sample.index), number(sample.score), number(sample.spread), *values)
        table.add_row(*row, "yes" if sample.is_suspect else "", *what)
    return table


def _subsets(subsets: Sequence[SubsetScore]) -> Table:
    table = Table(title="Subsets", title_justify="left")
    table.add_column("subset")
    for name in ("samples", "mean percentile", "± error", "suspects"):
        table.add_column(name, justify="right")
    for subset in subsets:
        share = f"{subset.suspects} ({100 * subset.suspects / subset.samples:.0f} %)"
        table.add_row(Text(subset.name), str(subset.samples), f"{subset.score:.1f}", number(subset.error, 1), share)
    return table
