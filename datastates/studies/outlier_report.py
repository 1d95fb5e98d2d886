"""Reports on outliers: tables for the terminal, an HTML page, and a sheet of pictures.

The page loads no other files and runs no scripts. matplotlib draws the sheet.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from datastates.thumbnails import array_of, draw, figure, thumbnail

from .outlier_scores import Ranking, SampleScore, Score, SubsetScore

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from .outlier_suspects import Selection

TOP = 15
FURTHER = 24
"""The most samples that the page shows by each score but the first."""
LEAST = 12
"""The fewest letters of a description that are shown, if they fit."""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --soft: #5b626c; --line: #d9dde2; --back: #fff; --card: #f6f7f9; --hot: #b3261e; --cool: #7d9cc0;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa2ad; --line: #343a42; --back: #14171b; --card: #1c2026; --hot: #ff8a80; --cool: #5f7fa5; }
}
* { box-sizing: border-box; }
body {
  margin: 2rem auto; max-width: 68rem; padding: 0 1.25rem;
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
}
h1 { margin: 0 0 .25rem; font-size: 1.7rem; }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.15rem; }
p, figcaption, dt { color: var(--soft); }
p { max-width: 46rem; }
p b { color: var(--ink); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
dl div { padding: .75rem 1rem; border-radius: .6rem; background: var(--card); }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
.text { text-align: left; white-space: normal; }
.hot { color: var(--hot); }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)); gap: .9rem; }
figure { margin: 0; }
.gallery figure { padding: .5rem; border-radius: .6rem; background: var(--card); border: 2px solid transparent; }
.gallery .suspect { border-color: var(--hot); }
img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated; }
figcaption { margin-top: .35rem; font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }
figcaption b { color: var(--ink); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
.curve { width: 5.6rem; }
.curve polyline { fill: none; stroke: var(--cool); stroke-width: 1.5; }
.rest { fill: var(--cool); }
.found { fill: var(--hot); }
"""
LEGEND = """<p>A sample's <b>percentile</b> is the share of all samples that its first score stands above. For the loss, it is the mean of two such shares where it
has a loss along the lineage (the mean over states that were trained on it, or may have been) and a held-out loss (under variants that
never saw it after their fork). The <b>spread</b> is the standard deviation of that percentile over the branches and variants that know the
sample. A high loss says that the label does not fit what the model learned from the rest: a wrong label, or an example that is rare or
hard. Look before you delete.</p>"""
COLUMNS = 8


@dataclass(frozen=True, slots=True)
class _Line:
    """A text on one line, cut to the available width. rich would cut the whole table for a column
    that does not wrap."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text(self.text.partition("\n")[0])
        line.truncate(options.max_width, overflow="ellipsis")
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = cell_len(self.text)
        return Measurement(min(LEAST, length), min(length, options.max_width))


def tables(
    report: Ranking, *, most: int = TOP, describe: Callable[[int], str] | None = None
) -> Iterator[RenderableType]:
    """The summary, the highest ranked samples and the subsets.

    ``describe(index)`` adds a line to each sample."""
    yield Text("\n".join(summary(report)))
    yield _samples_table(report, report.top(most), describe)
    if len(report.scores.columns) > 1:
        yield _plain_table("Scores", *_compared(report))
    if report.subsets:
        yield _plain_table("Subsets", SUBSETS, _subset_rows(report.subsets[:most]))


def summary(report: Ranking) -> list[str]:
    """A few lines about what was read, selected, spent and skipped."""
    selection = report.selection
    rate = (
        f"{100 * selection.noise_rate:.1f} % ({'estimated' if selection.is_estimated else 'given'})"
    )
    lines = [
        (
            f"{int(selection.suspects.sum())} suspects among {len(report)} samples, at a noise rate"
            f" of {rate}"
        ),
        f"false suspects: {_false(selection)}",
        f"read: {_read(report)}",
        f"cost: {report.cost}",
    ]
    if all(source.held_out is None for source in report.sources) and len(report.sources) < 2:
        lines.append(
            "one branch only, so there is no spread: another seed would tell how sure the ranks are"
        )
    lines += [
        f"skipped: {skipped.branch}{'' if skipped.step is None else f', step {skipped.step}'}:"
        f" {skipped.reason}"
        for skipped in report.skipped
    ]
    return [*lines, *(f"not detected: {limit}" for limit in limits(report))]


def limits(report: Ranking) -> list[str]:
    """The kinds of fault that the scores of this report do not detect (docs/benchmarks.md)."""
    columns = set(report.scores.columns)
    has_labels = not columns <= {Score.DISTANCE, Score.NEIGHBOURS}
    is_class = not columns.isdisjoint((Score.MARGIN, Score.NORMALIZED_MARGIN))
    margins = {Score.NORMALIZED_MARGIN, Score.HELD_OUT_MARGIN}
    found = {
        "wrong targets, because no score reads them": not has_labels,
        "most labels of one similar class, which look like hard samples": (
            has_labels and columns.isdisjoint(margins)
        ),
        "inputs far from all others, whose targets a model learns like any other": (
            Score.DISTANCE not in columns
        ),
        "errors of a target that are no larger than those of the model": not is_class,
        "faults that most samples of a class share, and duplicates": True,
    }
    return [fault for fault, is_so in found.items() if is_so]


def _false(selection: Selection) -> str:
    if selection.false_suspects is None:
        return "not known; up to 10 % of data without faults can be suspects"
    return f"about {selection.false_suspects:.1f} are expected, within a factor of about three"


def _compared(report: Ranking) -> tuple[list[str], list[list[str]]]:
    """A row for each score: its suspects, and how far it agrees with the first."""
    first, rows = report.selection.suspects, []
    for name, selection in report.selections.items():
        false = selection.false_suspects
        rows.append(
            [
                name,
                str(int(selection.suspects.sum())),
                number(false, 1),
                str(int((selection.suspects & first).sum())),
                ", ".join(str(sample.index) for sample in report.top(5, name)),
            ]
        )
    names = ["score", "suspects", "false, expected", "suspects of the first", "highest ranked"]
    return names, rows


def number(value: float | None, digits: int = 2) -> str:
    """The number as text; a dash if it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def _read(report: Ranking) -> str:
    parts = []
    for kind, held in (("along the lineage", False), ("of variants that held samples out", True)):
        sources = [source for source in report.sources if (source.held_out is not None) is held]
        if sources:
            states, of = (
                sum(len(source.states) for source in sources),
                sum(source.of for source in sources),
            )
            parts.append(
                f"{states} of {of} states {kind} ({len(sources)}"
                f" {'branch' if len(sources) == 1 else 'branches'})"
            )
    gone = sum(source.gone for source in report.sources)
    return ", ".join(parts) + (f"; {gone} have no bytes any more" if gone else "")


def losses_of(report: Ranking) -> list[tuple[str, str]]:
    """The kinds of loss that the report has, each as a heading and a field of a sample."""
    held = any(source.held_out is not None for source in report.sources)
    along = any(source.held_out is None for source in report.sources)
    return [
        *([("lineage loss", "lineage_loss")] if along else []),
        *([("held-out loss", "held_out_loss")] if held else []),
    ]


def _rows(
    report: Ranking, samples: Sequence[SampleScore], describe: Callable[[int], str] | None
) -> tuple[list[str], list[list[str]]]:
    """The heading and the rows of a table of samples, with the columns that are known."""
    losses = losses_of(report)
    told = {
        heading: key
        for heading, key in (("name", "name"), ("given", "given"), ("predicted", "predicted"))
        if any(getattr(sample, key) for sample in samples)
    }
    names = ["rank", "sample", *told, "percentile", "± spread", *(name for name, _ in losses)]
    rows = []
    for sample in samples:
        row = [str(sample.rank), str(sample.index)]
        row += [getattr(sample, key) or "" for key in told.values()]
        row += [number(sample.score), number(sample.spread)]
        row += [number(getattr(sample, key)) for _, key in losses]
        row.append("yes" if sample.is_suspect else "")
        rows.append([*row, *([describe(sample.index)] if describe is not None else [])])
    return [*names, "suspect", *(["what"] if describe is not None else [])], rows


def _samples_table(
    report: Ranking, samples: Sequence[SampleScore], describe: Callable[[int], str] | None
) -> Table:
    table = Table(
        title="Most suspicious samples",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    names, rows = _rows(report, samples, describe)
    for name in names:
        if name in TEXTS:
            table.add_column(name)
        else:
            table.add_column(name.replace(" ", "\n"), justify="right")
    for row in rows:
        cells = zip(names, row, strict=True)
        table.add_row(*(_Line(cell) if name in TEXTS else cell for name, cell in cells))
    return table


def _plain_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


SUBSETS = ("subset", "samples", "mean percentile", "± error", "suspects")
TEXTS = ("name", "given", "predicted", "what")


def _subset_rows(subsets: Sequence[SubsetScore]) -> list[list[str]]:
    return [
        [
            subset.name,
            str(subset.samples),
            f"{subset.score:.1f}",
            number(subset.error, 1),
            f"{subset.suspects} ({subset.suspects / subset.samples:.0%})",
        ]
        for subset in subsets
    ]


# --- HTML page ---


def page(
    report: Ranking,
    *,
    title: str,
    show: Callable[[int], object] | None,
    describe: Callable[[int], str] | None,
    most: int,
) -> str:
    """The page. ``show`` and ``describe`` are called for the ``most`` highest ranked samples."""
    top = report.top(most)
    missed = "".join(f"<li>{escape(limit)}</li>" for limit in limits(report))
    subsets = _table(SUBSETS, _subset_rows(report.subsets), text={"subset"})
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(report),
        f"<h2>All samples by how far they stand out</h2>{_histogram(report)}",
        *([f"<h2>Most suspicious</h2>{_gallery(top, show, describe)}"] if show is not None else []),
        f"<h2>The {len(top)} highest ranked</h2>{_samples_page(report, top, describe)}",
        LEGEND,
        *_further(report, most, show, describe),
        f"<h2>What these scores do not detect</h2><ul>{missed}</ul>",
        f"<p>False suspects: {escape(_false(report.selection))}.</p>",
        *([f"<h2>Subsets</h2>{subsets}"] if report.subsets else []),
        f"<h2>What was read</h2>{_sources(report)}",
        f"<p>Cost: {escape(str(report.cost))}.</p>",
        *([f"<h2>What could not be read</h2>{_skipped(report)}"] if report.skipped else []),
    ]
    head = "".join(
        (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
        )
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _facts(report: Ranking) -> str:
    selection, cost = report.selection, report.cost
    facts = {
        "samples": f"{len(report):,}",
        "suspects": f"{int(selection.suspects.sum()):,}",
        f"noise rate, {'estimated' if selection.is_estimated else 'given'}": (
            f"{100 * selection.noise_rate:.1f} %"
        ),
        "epochs, training and scoring": ("≥ " if cost.unrecorded else "") + f"{cost.total:.1f}",
        "states read": str(sum(len(source.states) for source in report.sources)),
    }
    return (
        "<dl>"
        + "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in facts.items()
        )
        + "</dl>"
    )


def _histogram(report: Ranking, width: int = 900, height: int = 190, bins: int = 60) -> str:
    """Bars of all samples, with the suspects at their foot.

    Heights are square roots. A bar of a few samples is then visible next to a bar of thousands.
    """
    known = np.isfinite(report.scores.strength)
    strength, suspects = report.scores.strength[known], report.selection.suspects[known]
    edges = np.histogram_bin_edges(strength, bins)
    every, found = (np.histogram(values, edges)[0] for values in (strength, strength[suspects]))
    scale, step = (height - 30) / max(1.0, float(np.sqrt(every.max(initial=0)))), width / bins
    bars = []
    for at, (total, hot) in enumerate(zip(every.tolist(), found.tolist(), strict=True)):
        tall = total**0.5 * scale
        share = tall * hot / total if total else 0.0
        for name, bottom, top in (("rest", share, tall), ("found", 0.0, share)):
            if top > bottom:
                place = (
                    f'x="{at * step:.1f}" y="{height - 20 - top:.1f}" width="{step - 1:.1f}"'
                    f' height="{top - bottom:.1f}"'
                )
                bars.append(
                    f'<rect class="{name}" {place}><title>{total} samples, {hot} of them'
                    " suspects</title></rect>"
                )
    ticks = [
        (0, "start", edges[0]),
        (width / 2, "middle", (edges[0] + edges[-1]) / 2),
        (width, "end", edges[-1]),
    ]
    texts = "".join(
        f'<text x="{x:.0f}" y="{height - 5}" text-anchor="{anchor}">{value:.1f}</text>'
        for x, anchor, value in ticks
    )
    caption = (
        "The first score, in standard deviations above the mean; suspects in red. Heights"
        " are square roots of counts."
    )
    label = "Histogram of the scores of all samples"
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{label}">{"".join(bars)}{texts}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _gallery(
    samples: Sequence[SampleScore],
    show: Callable[[int], object],
    describe: Callable[[int], str] | None,
) -> str:
    figures = []
    for sample in samples:
        data = base64.b64encode(thumbnail(show(sample.index), sample.index)).decode()
        what = f"<br>{escape(sample.name)}" if sample.name else ""
        what += f"<br>{escape(describe(sample.index))}" if describe is not None else ""
        kind = ' class="suspect"' if sample.is_suspect else ""
        image = f'<img alt="sample {sample.index}" src="data:image/png;base64,{data}">'
        figures.append(
            f"<figure{kind}>{image}<figcaption><b>{sample.rank}</b> ·"
            f" #{sample.index}{what}</figcaption></figure>"
        )
    return f'<div class="gallery">{"".join(figures)}</div>'


def _samples_page(
    report: Ranking, samples: Sequence[SampleScore], describe: Callable[[int], str] | None
) -> str:
    names, rows = _rows(report, samples, describe)
    curves: list[str] | None = None
    if any(len(sample.curve) > 1 for sample in samples):
        curves = [_curve(sample.curve) for sample in samples]
    return _table(names, rows, text=TEXTS, hot={"suspect"}, curves=curves)


def _curve(losses: Sequence[float | None], width: int = 90, height: int = 22) -> str:
    """The losses along the first branch as a line, from 0 to the highest."""
    known = [(at, loss) for at, loss in enumerate(losses) if loss is not None]
    highest = max([loss for _, loss in known], default=0.0) or 1.0
    across = width / max(1, len(losses) - 1)
    points = " ".join(
        f"{at * across:.1f},{height - 1 - (height - 2) * max(0.0, loss) / highest:.1f}"
        for at, loss in known
    )
    return (
        f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" aria-label="losses up to'
        f' {highest:.3g}"><polyline points="{points}"/></svg>'
    )


def _further(
    report: Ranking,
    most: int,
    show: Callable[[int], object] | None,
    describe: Callable[[int], str] | None,
) -> Iterator[str]:
    """The comparison of the scores, and the highest ranked by each but the first."""
    if len(report.scores.columns) < 2:
        return
    yield f"<h2>Scores compared</h2>{_table(*_compared(report), text={'score', 'highest ranked'})}"
    for name in list(report.scores.columns)[1:]:
        top = report.top(min(most, FURTHER), name)
        pictures = _gallery(top, show, describe) if show is not None else ""
        yield (
            f"<h2>Highest by {escape(name)}</h2>{pictures}{_samples_page(report, top, describe)}"
        )


def _sources(report: Ranking) -> str:
    rows = []
    for source in report.sources:
        held = "" if source.held_out is None else str(len(source.held_out))
        read = f"{len(source.states)} of {source.of}"
        rows.append(
            [
                source.name,
                read,
                str(source.gone),
                f"{source.states[0].step} to {source.states[-1].step}",
                held,
            ]
        )
    return _table(
        ["branch", "states read", "bytes gone", "steps", "samples held out"], rows, text={"branch"}
    )


def _skipped(report: Ranking) -> str:
    rows = [
        [skipped.branch, "" if skipped.step is None else str(skipped.step), skipped.reason]
        for skipped in report.skipped
    ]
    return _table(["branch", "step", "why"], rows, text={"branch", "why"})


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text: Collection[str],
    hot: Collection[str] = (),
    curves: Sequence[str] | None = None,
) -> str:
    """``curves`` are markup of our own, and not escaped, unlike the rest."""

    def cells(tag: str, values: Sequence[str]) -> Iterator[str]:
        for name, value in zip(names, values, strict=True):
            kind = ' class="text"' if name in text else ' class="hot"' if name in hot else ""
            yield f"<{tag}{kind}>{escape(value)}</{tag}>"

    ends = [""] * len(rows) if curves is None else [f"<td>{curve}</td>" for curve in curves]
    head = "".join(cells("th", names)) + ("" if curves is None else "<th>curve</th>")
    body = "".join(
        f"<tr>{''.join(cells('td', row))}{end}</tr>" for row, end in zip(rows, ends, strict=True)
    )
    return (
        "<div"
        f' class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


# --- Sheet of pictures ---


def sheet(
    samples: Sequence[SampleScore],
    path: Path,
    show: Callable[[int], object],
    describe: Callable[[int], str] | None,
) -> Path:
    """Write a grid of the samples, each under its rank and index, with suspects in red."""
    columns = min(COLUMNS, max(1, len(samples)))
    rows = max(1, math.ceil(len(samples) / columns))
    drawn = figure(1.5 * columns, 1.9 * rows + 0.5)
    drawn.suptitle("Most suspicious samples", x=0.01, ha="left", fontsize=13, fontweight="bold")
    grid = drawn.subplots(rows, columns, squeeze=False).ravel()
    for axes, sample in zip(grid, samples, strict=False):
        draw(axes, array_of(show(sample.index), sample.index))
        text = f"{sample.rank}: #{sample.index}" + (
            f"\n{describe(sample.index)}" if describe is not None else ""
        )
        # A user's text is not a formula: parse_math would treat its dollar signs as one.
        axes.set_title(
            text, fontsize=8, color="#b3261e" if sample.is_suspect else "#1b1f24", parse_math=False
        )
    for axes in grid:
        axes.set_axis_off()
    drawn.savefig(path, dpi=150, facecolor="white")
    return path
