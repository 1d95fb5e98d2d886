/** The distribution of a tensor's values in two states, as a figure. Pure. */
import { formatNumber } from "../../lib/format";
import type { Histogram } from "../../lib/types";
import { along, height, outline } from "../../panels/diff/spread";
import { documentOf, element, legendOf, type Ink } from "../svg";
import { BELOW, planeOf, roomFor } from "./plane";
import { linearMarks, logMarks } from "./ticks";

export interface HistogramOf {
  title: string;
  note: string;
  found: Histogram;
  /** The names of the states. */
  names: readonly string[];
  /** Whether counts are drawn on a logarithmic scale. */
  isLog: boolean;
}

const WIDTH = 720;
const HEIGHT = 360;
const EDGE = 20;

export function histogramFigure({ title, note, found, names, isLog }: HistogramOf, ink: Ink): string {
  const most = Math.max(1, ...found.states.flatMap((one) => one.counts));
  const counts = isLog ? [{ at: 0, text: "0" }, ...logMarks(1, most)] : linearMarks(0, most);
  const left = roomFor(counts);
  const [width, tall] = [WIDTH - left - EDGE, HEIGHT - BELOW];
  const place = along(found.edges, found.scale === "log");
  const high = height(most, isLog);
  const x = (at: number) => left + place(at) * width;
  const y = (count: number) => tall - high(count) * (tall - 8);
  const colours = [ink.muted, ink.accent, ...ink.lanes];
  const outlines = found.states.map((one, index) =>
    element("path", { d: outline(found.edges, one.counts, x, y), fill: colours[index], "fill-opacity": 0.22, stroke: colours[index], "stroke-width": index ? 1.5 : 1 }));
  const [first = 0, last = 1] = [found.edges[0], found.edges.at(-1)];
  const places = found.scale === "log" ? logMarks(first, last) : linearMarks(first, last);
  const plane = planeOf({
    left, top: 0, width, height: tall, body: outlines.join(""),
    across: { title: found.scale === "log" ? "magnitude (log)" : "value", ticks: places.map((mark) => ({ at: x(mark.at), text: mark.text })) },
    upwards: { title: isLog ? "elements in a bin (log)" : "elements in a bin", ticks: counts.map((mark) => ({ at: y(mark.at), text: mark.text })) },
  }, ink);
  const said = (value: number | null) => (value === null ? "–" : formatNumber(value));
  const keys = found.states.map((one, index) => ({ title: `${names[index] ?? ""}: mean ${said(one.mean)}, deviation ${said(one.deviation)}`, colour: colours[index]!, isArea: true }));
  const legend = legendOf(keys, left, HEIGHT + 8, width, ink);
  return documentOf({ title, note, width: WIDTH, height: HEIGHT + 8 + legend.height + 14, body: plane + legend.body }, ink);
}
