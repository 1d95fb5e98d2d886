/** The curves of a metric as a figure. Pure. */
import { AXES } from "../../panels/curves/ticks";
import type { Y } from "../../panels/curves/points";
import type { Axis } from "../../panels/curves/settings.svelte";
import { documentOf, element, legendOf, line, round, type Ink } from "../svg";
import { BELOW, planeOf, roomFor } from "./plane";
import { axisMarks, linearMarks, logMarks } from "./ticks";

export interface CurveLine {
  title: string;
  /** The number of its colour. */
  colour: number;
  dash: readonly number[];
  values: readonly Y[];
  /** The line before smoothing. */
  faint: readonly Y[] | null;
  band: { low: readonly Y[]; high: readonly Y[] } | null;
}

export interface CurvesOf {
  title: string;
  note: string;
  metric: string;
  axis: Axis;
  xs: readonly number[];
  /** Lines that are drawn last are on top; the legend has them in reverse order. */
  lines: readonly CurveLine[];
  /** Places where paths fork. */
  forks: readonly number[];
  /** The visible part of both axes; null: everything. */
  zoom: readonly [number, number] | null;
  seen: readonly [number, number];
  isLog: boolean;
}

const WIDTH = 900;
const HEIGHT = 380;
const EDGE = 20;

export function curvesFigure({ title, note, metric, axis, xs, lines, forks, zoom, seen, isLog }: CurvesOf, ink: Ink): string {
  const [from, to] = zoom ?? widened(xs[0] ?? 0, xs.at(-1) ?? 1);
  const [low, high] = seen;
  const put = isLog ? Math.log : (value: number) => value;
  const marks = isLog ? logMarks(low, high) : linearMarks(low, high);
  const left = roomFor(marks);
  const [width, tall] = [WIDTH - left - EDGE, HEIGHT - BELOW];
  const x = (at: number) => left + ((at - from) / (to - from)) * width;
  const y = (value: number) => tall - ((put(value) - put(low)) / (put(high) - put(low))) * tall;
  const draw = (values: readonly Y[]) => pathOf(xs, values, x, y, isLog);
  const colour = (one: CurveLine) => ink.lanes[one.colour] ?? ink.text;
  const body = [
    ...lines.flatMap((one) => (one.band ? [element("path", { d: areaOf(xs, one.band.low, one.band.high, x, y, isLog), fill: colour(one), "fill-opacity": 0.16 })] : [])),
    ...forks.map((at) => line(x(at), 0, x(at), tall, ink.muted, { "stroke-dasharray": "3 4", "stroke-opacity": 0.7 })),
    ...lines.flatMap((one) => (one.faint ? [element("path", { d: draw(one.faint), fill: "none", stroke: colour(one), "stroke-opacity": 0.3 })] : [])),
    ...lines.map((one) => element("path", { d: draw(one.values), fill: "none", stroke: colour(one), "stroke-width": 1.75, "stroke-linejoin": "round", "stroke-dasharray": one.dash.length ? one.dash.join(" ") : null })),
  ].join("");
  const plane = planeOf({
    left, top: 0, width, height: tall, body,
    across: { title: AXES[axis], ticks: axisMarks(from, to, axis).map((mark) => ({ at: x(mark.at), text: mark.text })) },
    upwards: { title: isLog ? `${metric} (log)` : metric, ticks: marks.map((mark) => ({ at: y(mark.at), text: mark.text })) },
  }, ink);
  const keys = [...lines].reverse().map((one) => ({ title: one.title, colour: colour(one), dash: one.dash }));
  const legend = legendOf(forks.length ? [...keys, { title: forks.length === 1 ? "fork" : "forks", colour: ink.muted, dash: [3, 4] }] : keys, left, HEIGHT + 8, width, ink);
  return documentOf({ title, note, width: WIDTH, height: HEIGHT + 8 + legend.height + 14, body: plane + legend.body }, ink);
}

const widened = (from: number, to: number): [number, number] => (to > from ? [from, to] : [from - 1, to + 1]);

/** A line through its points. Undefined means no point. A value that is not a number breaks the line, and so does, on a logarithmic axis, one without a place
 there. An isolated point is drawn as a dot. */
export function pathOf(xs: readonly number[], values: readonly Y[], x: (at: number) => number, y: (value: number) => number, isLog: boolean): string {
  let [path, isDown, alone] = ["", false, ""];
  values.forEach((value, index) => {
    if (value === undefined) return;
    if (value === null || (isLog && value <= 0)) {
      path += alone;
      [isDown, alone] = [false, ""];
      return;
    }
    path += `${isDown ? "L" : "M"}${round(x(xs[index]!))} ${round(y(value))}`;
    alone = isDown ? "" : "h.01";
    isDown = true;
  });
  return path + alone;
}

/** The area between two lines, wherever both have a point. */
function areaOf(xs: readonly number[], low: readonly Y[], high: readonly Y[], x: (at: number) => number, y: (value: number) => number, isLog: boolean): string {
  const there = xs.flatMap((at, index) => {
    const [least, most] = [low[index], high[index]];
    return typeof least !== "number" || typeof most !== "number" || (isLog && least <= 0) ? [] : [{ at, least, most }];
  });
  if (!there.length) return "";
  const over = there.map(({ at, most }) => `${round(x(at))} ${round(y(most))}`);
  const under = [...there].reverse().map(({ at, least }) => `${round(x(at))} ${round(y(least))}`);
  return `M${[...over, ...under].join("L")}Z`;
}
