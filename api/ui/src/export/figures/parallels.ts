/** Parallel coordinates as a figure. Pure. */
import { crossings, placeOf, ticks, type Axis, type Range } from "../../compare/axes";
import { documentOf, element, fitted, GROUND, line, round, text, type Ink } from "../svg";
import { coloursLegend, type Coloured } from "./colours";

export interface ParallelsOf extends Coloured {
  title: string;
  note: string;
  axes: readonly Axis[];
  ranges: readonly Range[];
  /** The order in which lines through one value are placed beside each other. */
  order: readonly (number | null)[];
}

const TOP = 40;
const LONG = 340;
const NONE = TOP + LONG + 26; // where lines without a value cross
const SIDE = 76;
const APART = 140;
const LEAST = 760;

export function parallelsFigure(asked: ParallelsOf, ink: Ink): string {
  const { title, note, axes, names, colours, kept, ranges, order } = asked;
  const width = Math.max(LEAST, 2 * SIDE + APART * (axes.length - 1));
  const between = axes.length > 1 ? (width - 2 * SIDE) / (axes.length - 1) : 0;
  const x = (index: number) => SIDE + index * between;
  const y = (place: number) => TOP + (1 - place) * LONG;
  const places = axes.map((axis) => crossings(axis, order));
  const hasNone = places.some((each) => each.includes(null));
  const at = (index: number, branch: number) => {
    const place = places[index]![branch];
    return place === null || place === undefined ? NONE : y(place);
  };
  const path = (branch: number) =>
    axes.map((_, index) => {
      const half = x(index) - between / 2;
      return index === 0 ? `M${round(x(0))} ${round(at(0, branch))}` : `C${round(half)} ${round(at(index - 1, branch))} ${round(half)} ${round(at(index, branch))} ${round(x(index))} ${round(at(index, branch))}`;
    }).join("");
  const drawn = names.map((_, branch) => branch).sort((one, other) => Number(kept[one]) - Number(kept[other]));
  const lines = drawn.map((branch) =>
    element("path", { d: path(branch), fill: "none", stroke: kept[branch] ? colours[branch] : ink.line, "stroke-width": kept[branch] ? 1.6 : 1, "stroke-opacity": kept[branch] ? 0.85 : 0.7 }));
  const body = lines.join("") + axes.map((axis, index) => axisOf(axis, x(index), Math.max(80, between - 8), ranges, places[index]!.includes(null), ink)).join("");
  const tall = (hasNone ? NONE + 12 : TOP + LONG + 14);
  const legend = coloursLegend(asked, SIDE - 10, tall + 10, width - 2 * SIDE + 20, ink);
  return documentOf({ title, note, width, height: tall + 10 + legend.height + 14, body: body + legend.body }, ink);
}

function axisOf(axis: Axis, x: number, width: number, ranges: readonly Range[], hasNone: boolean, ink: Ink): string {
  const y = (place: number) => TOP + (1 - place) * LONG;
  const range = ranges.find((one) => one.key === axis.key);
  const pad = axis.high > axis.low ? 0.012 : 0.2;
  const [low, high] = range ? [placeOf(axis, Math.max(range.low, axis.low)) - pad, placeOf(axis, Math.min(range.high, axis.high)) + pad] : [0, 0];
  const means = [axis.direction === "min" ? "lower is better" : axis.direction === "max" ? "higher is better" : "", axis.isLog ? "log" : ""].filter(Boolean).join(", ");
  const beside = { "stroke-width": 3, stroke: GROUND, "stroke-linejoin": "round" };
  const label = (at: number, said: string, more = {}) => text(x + 8, at + 4, said, { ...beside, ...more }) + text(x + 8, at + 4, said, more);
  return [
    text(x, 12, fitted(axis.label, width, 12, true), { "font-size": 12, "font-weight": "bold", "text-anchor": "middle", fill: axis.kind === "metric" ? ink.accent : ink.text }),
    text(x, 27, means, { "font-size": 10, "text-anchor": "middle", fill: ink.muted }),
    line(x, TOP, x, TOP + LONG, ink.edge, { "stroke-width": 1.2 }),
    ...(range ? [element("rect", { x: x - 7, y: y(high), width: 14, height: Math.max(4, (high - low) * LONG), rx: 3, fill: ink.accent, "fill-opacity": 0.22, stroke: ink.accent })] : []),
    ...ticks(axis).map((tick) => line(x - 4, y(tick.place), x, y(tick.place), ink.edge) + label(y(tick.place), fitted(tick.text, width - 14))),
    ...(hasNone ? [label(NONE, "none", { "font-style": "italic", fill: ink.muted })] : []),
  ].join("");
}
