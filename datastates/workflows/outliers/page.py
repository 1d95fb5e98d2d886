"""A report on outliers as one HTML page that loads no other files and runs no scripts."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterator, Sequence
from html import escape

import numpy as np

from datastates.show.thumbnails import thumbnail

from .ranking import Ranking, SampleScore
from .style import LEGEND, POLICY, STYLE
from .table import losses_of, number

__all__ = ["page"]


def page(report: Ranking, *, title: str, show: Callable[[int], object] | None, describe: Callable[[int], str] | None, most: int) -> str:
    """The page. ``show`` and ``describe`` are called for the ``most`` highest ranked samples."""
    top = report.top(most)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(report),
        f"<h2>All samples by how far they stand out</h2>{_histogram(report)}",
        *([f"<h2>Most suspicious</h2>{_gallery(top, show, describe)}"] if show is not None else []),
        f"<h2>The {len(top)} highest ranked</h2>{_samples(top, losses_of(report), describe)}",
        LEGEND,
        *([f"<h2>Subsets</h2>{_subsets(report)}"] if report.subsets else []),
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
        f"noise rate, {'estimated' if selection.is_estimated else 'given'}": f"{100 * selection.noise_rate:.1f} %",
        "epochs, training and scoring": ("≥ " if cost.unrecorded else "") + f"{cost.total:.1f}",
        "states read": str(sum(len(source.states) for source in report.sources)),
    }
    return "<dl>" + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()) + "</dl>"


def _histogram(report: Ranking, width: int = 900, height: int = 190, bins: int = 60) -> str:
    """Bars of all samples, with the suspects at their foot. Heights are square roots, so that a bar of a few is visible beside one of
    thousands.
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
                place = f'x="{at * step:.1f}" y="{height - 20 - top:.1f}" width="{step - 1:.1f}" height="{top - bottom:.1f}"'
                bars.append(f'<rect class="{name}" {place}><title>{total} samples, {hot} of them suspects</title></rect>')
    ticks = [(0, "start", edges[0]), (width / 2, "middle", (edges[0] + edges[-1]) / 2), (width, "end", edges[-1])]
    texts = "".join(f'<text x="{x:.0f}" y="{height - 5}" text-anchor="{anchor}">{value:.1f}</text>' for x, anchor, value in ticks)
    caption = "Mean standardised loss, in standard deviations above the mean; suspects in red. Heights are square roots of counts."
    label = "Histogram of the scores of all samples"
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(bars)}{texts}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _gallery(samples: Sequence[SampleScore], show: Callable[[int], object], describe: Callable[[int], str] | None) -> str:
    figures = []
    for sample in samples:
        data = base64.b64encode(thumbnail(show(sample.index), sample.index)).decode()
        what = f"<br>{escape(describe(sample.index))}" if describe is not None else ""
        kind = ' class="suspect"' if sample.is_suspect else ""
        image = f'<img alt="sample {sample.index}" src="data:image/png;base64,{data}">'
        figures.append(f"<figure{kind}>{image}<figcaption><b>{sample.rank}</b> · #{sample.index}{what}</figcaption></figure>")
    return f'<div class="gallery">{"".join(figures)}</div>'


def _samples(samples: Sequence[SampleScore], losses: Sequence[tuple[str, str]], describe: Callable[[int], str] | None) -> str:
    names = ["rank", "sample", "percentile", "± spread", *(heading for heading, _ in losses), "suspect"]
    rows = []
    for sample in samples:
        values = [str(sample.rank), str(sample.index), number(sample.score), number(sample.spread)]
        values += [number(getattr(sample, field)) for _, field in losses]
        values.append("yes" if sample.is_suspect else "")
        rows.append([*values, *([describe(sample.index)] if describe is not None else [])])
    return _table([*names, *(["what"] if describe is not None else [])], rows, text={"what"}, hot={"suspect"})


def _subsets(report: Ranking) -> str:
    rows = [
        [
            subset.name,
            str(subset.samples),
            f"{subset.score:.1f}",
            number(subset.error, 1),
            f"{subset.suspects} ({subset.suspects / subset.samples:.0%})",
        ]
        for subset in report.subsets
    ]
    return _table(["subset", "samples", "mean percentile", "± error", "suspects"], rows, text={"subset"})


def _sources(report: Ranking) -> str:
    rows = []
    for source in report.sources:
        held = "" if source.held_out is None else str(len(source.held_out))
        read = f"{len(source.states)} of {source.of}"
        rows.append([source.name, read, str(source.gone), f"{source.states[0].step} to {source.states[-1].step}", held])
    return _table(["branch", "states read", "bytes gone", "steps", "samples held out"], rows, text={"branch"})


def _skipped(report: Ranking) -> str:
    rows = [[skipped.branch, "" if skipped.step is None else str(skipped.step), skipped.reason] for skipped in report.skipped]
    return _table(["branch", "step", "why"], rows, text={"branch", "why"})


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[str], hot: Collection[str] = ()) -> str:
    def cells(tag: str, values: Sequence[str]) -> Iterator[str]:
        for name, value in zip(names, values, strict=True):
            kind = ' class="text"' if name in text else ' class="hot"' if name in hot else ""
            yield f"<{tag}{kind}>{escape(value)}</{tag}>"

    head = "".join(cells("th", names))
    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
