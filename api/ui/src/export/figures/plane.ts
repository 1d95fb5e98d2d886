/** A plane with two axes, their ticks and titles, on which curves, scatter plots and histograms are drawn. Pure. */
import { element, line, text, widthOf, type Ink } from "../svg";

export interface Tick {
  /** In pixels. */
  at: number;
  text: string;
}

export interface Plane {
  left: number;
  top: number;
  width: number;
  height: number;
  /** The content, in pixels of the figure; clipped at the edges. */
  body: string;
  across: { title: string; ticks: readonly Tick[] };
  upwards: { title: string; ticks: readonly Tick[] };
}

const APART = 10;

/** The width of the labels of a vertical axis, with its title. */
export const roomFor = (ticks: readonly { text: string }[]): number => 40 + Math.max(24, ...ticks.map((tick) => widthOf(tick.text)));

/** The part below the plane: labels and a title. */
export const BELOW = 44;

export function planeOf({ left, top, width, height, body, across, upwards }: Plane, ink: Ink): string {
  const [right, bottom] = [left + width, top + height];
  const grid = { "stroke-width": 1 };
  return [
    element("defs", {}, element("clipPath", { id: "plane" }, element("rect", { x: left, y: top, width, height }))),
    ...across.ticks.map((tick) => line(tick.at, top, tick.at, bottom, ink.line, grid)),
    ...upwards.ticks.map((tick) => line(left, tick.at, right, tick.at, ink.line, grid)),
    ...spaced(across.ticks).map((tick) => text(tick.at, bottom + 16, tick.text, { fill: ink.muted, "text-anchor": "middle" })),
    ...upwards.ticks.map((tick) => text(left - 7, tick.at + 4, tick.text, { fill: ink.muted, "text-anchor": "end" })),
    element("g", { "clip-path": "url(#plane)" }, body),
    line(left, bottom, right, bottom, ink.edge),
    line(left, top, left, bottom, ink.edge),
    text((left + right) / 2, bottom + 36, across.title, { "font-weight": "bold", "text-anchor": "middle" }),
    element("g", { transform: `translate(18 ${(top + bottom) / 2}) rotate(-90)` }, text(0, 0, upwards.title, { "font-weight": "bold", "text-anchor": "middle" })),
  ].join("");
}

/** Labels side by side, without overlap. */
function spaced(ticks: readonly Tick[]): Tick[] {
  const shown: Tick[] = [];
  for (const tick of ticks) {
    const last = shown.at(-1);
    if (!last || tick.at - last.at >= (widthOf(tick.text) + widthOf(last.text)) / 2 + APART) shown.push(tick);
  }
  return shown;
}
