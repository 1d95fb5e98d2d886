/** One setting or metric against another as a figure. Pure. */
import { numberOf, placeOf, ticks, type Axis } from "../../compare/axes";
import { documentOf, element, escaped, GROUND, type Ink } from "../svg";
import { coloursLegend, type Coloured } from "./colours";
import { BELOW, planeOf, roomFor } from "./plane";

export interface ScatterOf extends Coloured {
  title: string;
  note: string;
  across: Axis;
  upwards: Axis;
}

const WIDTH = 720;
const HEIGHT = 440;
const EDGE = 20;
const INSIDE = 12;

export function scatterFigure(asked: ScatterOf, ink: Ink): string {
  const { title, note, across, upwards, names, colours, kept } = asked;
  const marks = ticks(upwards);
  const left = roomFor(marks);
  const [width, tall] = [WIDTH - left - EDGE, HEIGHT - BELOW];
  const x = (place: number) => left + INSIDE + place * (width - 2 * INSIDE);
  const y = (place: number) => tall - INSIDE - place * (tall - 2 * INSIDE);
  const points = names.flatMap((name, line) => {
    const [one, other] = [numberOf(across, across.values[line]), numberOf(upwards, upwards.values[line])];
    return one === null || other === null ? [] : [{ name, line, cx: x(placeOf(across, one)), cy: y(placeOf(upwards, other)) }];
  });
  const dots = [...points].sort((one, other) => Number(kept[one.line]) - Number(kept[other.line])).map(({ name, line, cx, cy }) =>
    element("circle", { cx, cy, r: 5, fill: kept[line] ? colours[line] : ink.line, stroke: GROUND }, element("title", {}, escaped(name))));
  const plane = planeOf({
    left, top: 0, width, height: tall, body: dots.join(""),
    across: { title: titleOf(across), ticks: ticks(across).map((tick) => ({ at: x(tick.place), text: tick.text })) },
    upwards: { title: titleOf(upwards), ticks: marks.map((tick) => ({ at: y(tick.place), text: tick.text })) },
  }, ink);
  const legend = coloursLegend(asked, left, HEIGHT + 10, width, ink);
  return documentOf({ title, note, width: WIDTH, height: HEIGHT + 10 + legend.height + 14, body: plane + legend.body }, ink);
}

const titleOf = (axis: Axis) => `${axis.label}${axis.isLog ? " (log)" : ""}`;
