"""The style of the page of a report on outliers, and its explanations."""

from __future__ import annotations

__all__ = ["LEGEND", "POLICY", "STYLE"]

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
.rest { fill: var(--cool); }
.found { fill: var(--hot); }
"""

LEGEND = """<p>A sample's <b>percentile</b> is the share of all samples that its loss stands above: the mean of two such shares where it
has a loss along the lineage (the mean over states that were trained on it, or may have been) and a held-out loss (under variants that
never saw it after their fork). The <b>spread</b> is the standard deviation of that percentile over the branches and variants that know the
sample. A high loss says that the label does not fit what the model learned from the rest: a wrong label, or an example that is rare or
hard. Look before you delete.</p>"""
