/** Rows of the graph as a figure: lanes, states, names, and a few columns. Pure. */
import { formatCount, isGone } from "../../lib/format";
import { colourNumber } from "../../lib/colours";
import type { GraphRow, State } from "../../lib/types";
import { linesOf, spread, xOf, type Spread } from "../../table/lanes";
import { documentOf, element, fitted, GROUND, line, text, widthOf, type Ink } from "../svg";

export interface GraphOf {
  title: string;
  note: string;
  rows: readonly GraphRow[];
  /** The name of a branch by its key. */
  branch: (key: number) => string | null;
  /** The state with the best value of all. */
  best: string | null;
  columns: readonly { title: string; of: (state: State) => string; isNumber: boolean; width?: number }[];
}

const ROW = 24;
const NAMES = [110, 320] as const; // the least and the most
const COLUMN = 92;
const HEAD = 26;
const EDGE = 16;
const WIDEST = 360;

export function graphFigure({ title, note, rows, branch, best, columns }: GraphOf, ink: Ink): string {
  const lanes = Math.max(0, ...rows.flatMap((row) => [row.lane, ...row.above, ...row.below]));
  const at = spread(lanes + 1, WIDEST);
  const names = EDGE + at.width + 8;
  const wide = Math.max(NAMES[0], Math.min(NAMES[1], Math.max(...rows.map((row) => row.refs.reduce((sum, ref) => sum + Math.min(200, widthOf(ref.name, 11, true)) + 20, row.state.uid === best ? 90 : 20)))));
  const widths = columns.map((column) => column.width ?? COLUMN);
  const places = widths.map((_, place) => names + wide + widths.slice(0, place).reduce((sum, each) => sum + each, 0));
  const width = Math.max(620, names + wide + widths.reduce((sum, each) => sum + each, 0) + EDGE);
  /** The position of a column's text: for numbers, its right end. */
  const x = (place: number) => places[place]! + (columns[place]!.isNumber ? widths[place]! - 12 : 0);
  const colour = (key: number) => {
    const name = branch(key);
    return name === null ? ink.muted : (ink.lanes[colourNumber(name)] ?? ink.muted);
  };
  const top = (index: number) => HEAD + index * ROW;
  const heads = ["Graph", "Names", ...columns.map((column) => column.title)].map((said, index) => {
    const number = index > 1 && columns[index - 2]!.isNumber;
    return text(index === 0 ? EDGE : index === 1 ? names : x(index - 2), 14, fitted(said, (widths[index - 2] ?? COLUMN) - 6, 11, true), { "font-weight": "bold", fill: ink.muted, "text-anchor": number ? "end" : "start" });
  });
  const body = [
    ...heads, line(EDGE, HEAD - 6, width - EDGE, HEAD - 6, ink.line),
    ...rows.map((row, index) => element("g", { fill: "none", "stroke-width": 1.75 }, ...linesOf(row).map((one) => strokeOf(one, top(index), at, colour(one.branch))))),
    ...rows.map((row, index) => stateOf(row, top(index) + ROW / 2, at, colour(row.branch), ink)),
    ...rows.map((row, index) => chipsOf(row, names, wide, top(index) + ROW / 2, best, ink)),
    ...rows.flatMap((row, index) => columns.map((column, place) =>
      text(x(place), top(index) + ROW / 2 + 4, fitted(column.of(row.state), widths[place]! - 10), { "text-anchor": column.isNumber ? "end" : "start" }))),
  ];
  const under = top(rows.length) + 12;
  body.push(symbolsOf(EDGE, under, ink));
  return documentOf({ title, note, width, height: under + 34, body: body.join("") }, ink);
}

/** A line within a row: straight, or around the corner, and level where it meets a state. */
function strokeOf({ from, to, begins, ends }: ReturnType<typeof linesOf>[number], top: number, at: Spread, stroke: string): string {
  const [x0, x1, y0, y1] = [EDGE + xOf(from, at), EDGE + xOf(to, at), top + begins * ROW, top + ends * ROW];
  if (x0 === x1) return line(x0, y0, x1, y1, stroke);
  const bend = Math.sign(x1 - x0) * Math.min(ROW / 2 - 4, Math.abs(x1 - x0));
  const [long, tall] = [Math.abs(bend), y1 - y0];
  const turn = Math.min(long, tall);
  const d = begins === 0 ? `M${x0} ${y0}V${y1 - turn}Q${x0} ${y1} ${x0 + Math.sign(bend) * turn} ${y1}H${x1}` : `M${x0} ${y0}H${x1 - Math.sign(bend) * turn}Q${x1} ${y0} ${x1} ${y0 + turn}V${y1}`;
  return element("path", { d, stroke });
}

function stateOf(row: GraphRow, y: number, at: Spread, colour: string, ink: Ink): string {
  const x = EDGE + xOf(row.lane, at);
  const r = Math.min(4.5, at.gap / 2 + 1.5);
  if (row.count > 1) return element("rect", { x: x - r - 1, y: y - 9, width: 2 * r + 2, height: 18, fill: GROUND }) + [-6, 0, 6].map((away) => element("circle", { cx: x, cy: y + away, r: 2, fill: colour })).join("");
  const ring = row.refs.length ? element("circle", { cx: x, cy: y, r: r + 2.5, fill: GROUND, stroke: colour, "stroke-width": 1.5 }) : "";
  const dot = isGone(row.state.status) ? { fill: GROUND, stroke: colour, "stroke-width": 1.5 } : { fill: colour };
  return ring + element("circle", { cx: x, cy: y, r, ...dot }) + (row.state.status === "captured" ? element("circle", { cx: x, cy: y, r: Math.max(0.5, r - 2.5), fill: ink.line }) : "");
}

function chipsOf(row: GraphRow, left: number, wide: number, y: number, best: string | null, ink: Ink): string {
  if (row.count > 1) {
    const kept = row.restorable ? `, ${formatCount(row.restorable)} kept` : "";
    return text(left, y + 4, `${formatCount(row.count)} states${kept}`, { fill: ink.muted });
  }
  const chips = [...(row.state.uid === best ? [{ name: "★ best", colour: ink.good, r: 8 }] : []), ...row.refs.map((ref) => ({ name: ref.name, colour: ref.kind === "branch" ? (ink.lanes[colourNumber(ref.name)] ?? ink.text) : ink.muted, r: ref.kind === "branch" ? 8 : 2 }))];
  let x = left;
  return chips.map(({ name, colour, r }) => {
    const room = left + wide - 14 - x;
    if (room < 40) return "";
    const said = fitted(name, Math.min(200, room - 14), 11, true);
    const width = widthOf(said, 11, true) + 14;
    const chip = element("rect", { x, y: y - 8.5, width, height: 17, rx: r, fill: GROUND, stroke: colour }) + text(x + 7, y + 4, said, { fill: colour, "font-weight": "bold" });
    x += width + 5;
    return chip;
  }).join("");
}

/** The legend for the dots. */
function symbolsOf(left: number, y: number, ink: Ink): string {
  const shown: readonly (readonly [string, string])[] = [
    [element("circle", { cx: 6, cy: 0, r: 4.5, fill: ink.muted }), "its bytes are kept"],
    [element("circle", { cx: 6, cy: 0, r: 4.5, fill: GROUND, stroke: ink.muted, "stroke-width": 1.5 }), "its bytes are gone"],
    [element("circle", { cx: 6, cy: 0, r: 7, fill: GROUND, stroke: ink.muted, "stroke-width": 1.5 }) + element("circle", { cx: 6, cy: 0, r: 4.5, fill: ink.muted }), "a name leads to it"],
    [[-6, 0, 6].map((away) => element("circle", { cx: 6, cy: away, r: 2, fill: ink.muted })).join(""), "several states"],
  ];
  let x = left;
  return shown.map(([symbol, means]) => {
    const made = element("g", { transform: `translate(${x} ${y + 8})` }, symbol, text(20, 4, means, { fill: ink.muted }));
    x += 20 + widthOf(means) + 24;
    return made;
  }).join("");
}
