import { expect, it } from "vitest";
import { makeAxis } from "../../compare/axes";
import type { GraphRow, Histogram, State } from "../../lib/types";
import { documentOf, element, escaped, type Ink } from "../svg";
import { curvesFigure, pathOf, type CurvesOf } from "./curves";
import { graphFigure } from "./graph";
import { histogramFigure } from "./histogram";
import { parallelsFigure } from "./parallels";
import { scatterFigure } from "./scatter";
import { axisMarks, linearMarks, logMarks } from "./ticks";

const ink: Ink = { text: "#000001", muted: "#000002", line: "#000003", edge: "#000004", accent: "#000005", good: "#000006", lanes: Array.from({ length: 10 }, (_, at) => `#10000${at}`), ramp: ["#200000", "#200001"] };
const NAME = `<script>&"'\u0001`;

const curves = (more: Partial<CurvesOf> = {}): CurvesOf => ({
  title: NAME, note: "a note", metric: "loss", axis: "step", xs: [0, 1, 2, 3], forks: [1], zoom: null, seen: [0, 4], isLog: false,
  lines: [{ title: "main", colour: 3, dash: [7, 4], values: [4, 3, null, 1], faint: null, band: { low: [3, 2, null, 0], high: [5, 4, null, 2] } }], ...more,
});
const state = (uid: string, step: number) => ({ uid, step, status: "durable", metrics: { loss: step / 2 }, attributes: {}, parents: [], message: null, created_at: "2026-01-01T00:00:00Z" }) as unknown as State;
const row = (uid: string, step: number, more: Partial<GraphRow>): GraphRow =>
  ({ state: state(uid, step), lane: 0, above: [], below: [], joins: [], parents: [], branch: 0, above_branches: [], below_branches: [], refs: [], count: 1, restorable: null, oldest: null, ...more }) as GraphRow;
const axes = [makeAxis({ key: "config.lr", kind: "setting", values: [0.1, 0.01, null], varies: true, direction: null }), makeAxis({ key: "metrics.loss", kind: "metric", values: [1, 2, 3], varies: true, direction: "min" })];
const coloured = { names: ["a", NAME, "c"], colours: ["#300000", "#300001", "#300002"], kept: [true, true, false], scale: null, title: "t", note: "n" };

const FIGURES: Readonly<Record<string, string>> = {
  curves: curvesFigure(curves(), ink),
  log: curvesFigure(curves({ isLog: true, seen: [0.5, 4] }), ink),
  scatter: scatterFigure({ ...coloured, across: axes[0]!, upwards: axes[1]! }, ink),
  parallels: parallelsFigure({ ...coloured, axes, ranges: [{ key: "config.lr", low: 0.01, high: 0.05 }], order: [1, 2, 3] }, ink),
  scaled: parallelsFigure({ ...coloured, scale: { title: "loss", marks: [{ place: 0, text: "1" }, { place: 1, text: "3" }] }, axes, ranges: [], order: [1, 2, 3] }, ink),
  histogram: histogramFigure({ title: NAME, note: "n", names: ["old", "new"], isLog: true, found: { edges: [0, 1, 2], scale: "linear", states: [{ counts: [9, 1], mean: 1, deviation: 1 }, { counts: [2, 3], mean: 2, deviation: null }] } as unknown as Histogram }, ink),
  graph: graphFigure({
    title: NAME, note: "n", branch: (key) => (key === 0 ? "main" : null), best: "b", columns: [{ title: "Step", isNumber: true, of: (one) => String(one.step) }],
    rows: [row("a", 3, { refs: [{ name: NAME, kind: "branch", state: "a", version: 1, message: null }] as GraphRow["refs"], below: [0], parents: [0], below_branches: [0] }), row("b", 2, { above: [0], above_branches: [0], count: 7, restorable: 2 })],
  }, ink),
};

it.each(Object.entries(FIGURES))("%s stands on its own: light, closed, without style, script or anything from elsewhere", (_, svg) => {
  expect(svg).toMatch(/^<\?xml[^>]*>\n<svg xmlns="http:\/\/www\.w3\.org\/2000\/svg" width="\d+" height="[\d.]+"/);
  expect(svg).toContain('fill="#ffffff"');
  expect(svg).not.toMatch(/<script| style=| class=|href|var\(|NaN|undefined|Infinity|\u0001/);
  const open: string[] = [];
  for (const [, close, name, own] of svg.matchAll(/<(\/?)([a-zA-Z]+)(?:[^<>"]|"[^"]*")*?(\/?)>/g)) {
    if (close) expect(open.pop()).toBe(name);
    else if (!own) open.push(name!);
  }
  expect(open).toEqual([]);
});

it("says what is drawn: title, axes, legend", () => {
  const said = (name: string) => [...FIGURES[name]!.matchAll(/<text[^>]*>([^<]*)<\/text>/g)].map((found) => found[1]);
  expect(said("curves")).toEqual(expect.arrayContaining([escaped(NAME), "a note", "step", "loss", "main", "fork", "0", "4"]));
  expect(said("scatter")).toEqual(expect.arrayContaining(["lr", "loss", "a"]));
  expect(said("parallels")).toEqual(expect.arrayContaining(["lr", "lower is better", "none"]));
  expect(said("scaled")).toEqual(expect.arrayContaining(["loss", "1", "3"]));
  expect(said("graph")).toEqual(expect.arrayContaining(["Names", "Step", "3", "7 states, 2 kept", "several states"]));
});

it("parts a line where there is no number, and shows a point that is alone", () => {
  const at = (value: number) => value;
  expect(pathOf([0, 1, 2, 3, 4], [1, undefined, 2, null, 3], at, at, false)).toBe("M0 1L2 2M4 3h.01");
  expect(pathOf([0, 1, 2], [-1, 0, 5], at, at, true)).toBe("M2 5h.01");
});

it("keeps what is no letter of XML out", () => {
  expect(element("a", { b: NAME, c: null, d: 0.12345 }, escaped(NAME))).toBe('<a b="&#60;script&#62;&#38;&#34;&#39;\ufffd" d="0.12">&#60;script&#62;&#38;&#34;&#39;\ufffd</a>');
  expect(documentOf({ title: "t", note: "", width: 100, height: 10, body: "" }, ink)).toContain('viewBox="0 0 100 68"');
});

it("marks axes at round places", () => {
  expect(linearMarks(0, 10).map((mark) => mark.text)).toEqual(["0", "2", "4", "6", "8", "10"]);
  expect(linearMarks(3, 3)).toEqual([{ at: 3, text: "3" }]);
  expect(logMarks(0.01, 1).map((mark) => mark.at)).toEqual([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]);
  expect(logMarks(0.4, 1.4).map((mark) => mark.text)).toEqual(["0.4", "0.6", "0.8", "1", "1.2", "1.4"]);
  expect(axisMarks(0, 3, "step").map((mark) => mark.at)).toEqual([0, 1, 2, 3]);
  expect(axisMarks(0, 7_200, "elapsed").map((mark) => mark.text)).toEqual(["0", "30 min", "1 h", "1 h 30 min", "2 h"]);
});
