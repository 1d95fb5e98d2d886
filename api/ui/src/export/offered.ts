/** What each view offers to save: the sources of its table and its figure. */
import type { Axis, Range, Tick } from "../compare/axes";
import { getStudy, type GraphOf } from "../lib/api";
import { formatCount, formatTime, shortUid } from "../lib/format";
import type { Branch, Comparison, GraphRow, Histogram, Parallels, SeriesLine, State, Stats } from "../lib/types";
import type { Mean } from "../panels/curves/groups";
import type { TensorChange } from "../panels/diff/types";
import { columnOf, textOf } from "../table/columns";
import { measured, Sheet } from "./csv";
import { curvesFigure, type CurvesOf } from "./figures/curves";
import { graphFigure } from "./figures/graph";
import { histogramFigure } from "./figures/histogram";
import { parallelsFigure } from "./figures/parallels";
import { scatterFigure } from "./figures/scatter";
import { lightColours, lightInk } from "./light";
import type { Offer, Work } from "./offers.svelte";
import { branchesSheet, comparisonSheet, graphSheet, histogramSheet, meansSheet, parallelsSheet, scatterSheet, statesSheet, stateColumns, studySheet, tensorsSheet } from "./tables";
import { eachBefore, eachBranch, eachFound, eachRow } from "./whole";

const VIEW = 0;
const PANEL = 10;
const ROWS = 400; // rows of the graph in a figure

/** Every branch that matches, not only those that are loaded. */
export function branchesOffer(asked: () => Parameters<typeof eachBranch>[0]): Offer {
  const csv = async (work: Work) => {
    const items: Branch[] = [];
    let metric: string | null = null;
    const query = asked();
    await eachBranch(query, work, (branch, whole) => {
      items.push(branch);
      metric = whole.metric;
    });
    return branchesSheet(items, metric, typeof query.group === "string" ? query.group : "");
  };
  return { title: "Branches", view: "branches", metric: asked().metric ?? "", rank: VIEW, csv };
}

const known = (stats: Stats | null) => ({ metrics: (stats?.metrics ?? []).map((one) => one.key), attributes: stats?.attributes ?? [], config: stats?.config ?? [] });

/** Every state that the filter finds. */
export function foundOffer(query: string, shown: readonly string[], stats: () => Stats | null, names: (uid: string) => string[]): Offer {
  const csv = async (work: Work) => {
    const { sheet, add } = statesSheet(stateColumns(known(stats()), shown));
    await eachFound(query, work, (state) => add(state, names(state.uid)));
    return sheet;
  };
  return { title: "Found states", view: "found", metric: "", rank: VIEW, csv };
}

interface HistoryOf {
  of: () => GraphOf;
  isFolded: boolean;
  shown: readonly string[];
  stats: () => Stats | null;
  best: () => string | null;
  /** The first row in sight, and how many rows there are. */
  seen: () => { first: number; total: number };
  repository: string;
}

/** The rows of the graph: all of them as a table, as a figure those from the first in sight on. */
export function historyOffer({ of, isFolded, shown, stats, best, seen, repository }: HistoryOf): Offer {
  const csv = async (work: Work) => {
    const { sheet, add } = graphSheet(stateColumns(known(stats()), shown));
    await eachRow(of(), work, add);
    return sheet;
  };
  const svg = async (work: Work) => {
    const asked = of();
    const { first, total } = seen();
    const start = total <= ROWS ? 0 : Math.min(first, total - ROWS);
    const rows: GraphRow[] = [];
    const branches = new Map<number, string | null>();
    await eachRow(asked, work, (row, branch) => rows.push(named(row, branch, branches)), start, ROWS);
    const columns = shown.filter((id) => id !== "refs").map(figureColumn);
    const heads = asked.heads.length ? asked.heads.join(", ") : "every branch and tag";
    const part = rows.length < total ? `rows ${formatCount(start + 1)} to ${formatCount(start + rows.length)} of ${formatCount(total)}` : `${formatCount(rows.length)} rows`;
    return graphFigure({ title: `History of ${repository}`, note: `${heads}; ${part}, the newest first`, rows, branch: (key) => branches.get(key) ?? null, best: best(), columns }, lightInk());
  };
  return { title: isFolded ? "Graph" : "History", view: isFolded ? "graph" : "states", metric: "", rank: VIEW, csv, svg };
}

/** A column of a figure. A figure gets times, since an age would be wrong tomorrow. */
function figureColumn(id: string) {
  if (id === "age") return { title: "Captured", isNumber: false, width: 128, of: (state: State) => formatTime(state.created_at).slice(0, 16) };
  const { title, isNumber } = columnOf(id);
  return { title, isNumber, of: (state: State) => textOf(id, state, 0), ...(id === "message" ? { width: 180 } : {}) };
}

/** Keys of branches are valid for one answer only, so a figure made of several answers stores names. */
function named(row: GraphRow, branch: string | null, branches: Map<number, string | null>): GraphRow {
  if (row.branch >= 0) branches.set(row.branch, branch);
  return row;
}

export interface Compared {
  branches: Parallels["branches"];
  axes: readonly Axis[];
  shown: readonly Axis[];
  kept: readonly boolean[];
  /** In CSS, as the page shows them. */
  colours: readonly string[];
  colour: Axis | null;
  marks: readonly Tick[];
  order: readonly (number | null)[];
  ranges: readonly Range[];
  across: Axis | null;
  upwards: Axis | null;
  chief: string;
  note: string;
}

export function compareOffers(what: () => Compared): Offer[] {
  const { shown, across, upwards, chief } = what();
  const coloured = () => {
    const { branches, colours, kept, colour, marks } = what();
    const scale = colour && marks.length ? { title: `coloured by ${colour.label}${colour.isLog ? " (log)" : ""}`, marks } : null;
    return { names: branches.map((one) => one.branch), colours: lightColours(colours), kept, scale };
  };
  const parallels: Offer = {
    title: "Parallel coordinates", view: "parallels", metric: chief, rank: VIEW,
    csv: () => parallelsSheet(what().branches, what().axes, what().kept),
    svg: () => parallelsFigure({ ...coloured(), title: "Branches by settings and metrics", note: what().note, axes: what().shown, ranges: what().ranges, order: what().order }, lightInk()),
  };
  if (!across || !upwards) return shown.length ? [parallels] : [];
  const scatter: Offer = {
    title: `Scatter of ${upwards.label} against ${across.label}`, view: `scatter-${across.label}`, metric: upwards.label, rank: VIEW + 1,
    csv: () => scatterSheet(what().branches.map((one) => one.branch), across, upwards, what().kept),
    svg: () => scatterFigure({ ...coloured(), title: `${upwards.label} against ${across.label}`, note: what().note, across, upwards }, lightInk()),
  };
  return shown.length ? [parallels, scatter] : [scatter];
}

export const besideOffer = (found: () => Comparison): Offer => ({ title: "States beside each other", view: "comparison", metric: "", rank: VIEW + 2, csv: () => comparisonSheet(found()) });

export interface Curved {
  metric: string;
  lines: readonly SeriesLine[];
  group: string;
  spread: "range" | "sigma";
  means: () => { name: string; mean: Mean }[];
  figure: () => Omit<CurvesOf, "title" | "metric">;
}

/** The curves of a metric: as a table all their points, not only the drawn ones; means as they are drawn. */
export function curveOffer({ metric, lines, group, spread, means, figure }: Curved): Offer {
  const csv = (work: Work) => (group ? meansSheet(figure().axis, metric, spread, means()) : pointsSheet(metric, lines, figure().axis, work));
  return { title: `Curves of ${metric}`, view: "curves", metric, rank: PANEL, csv, svg: () => curvesFigure({ title: metric, metric, ...figure() }, lightInk()) };
}

async function pointsSheet(metric: string, lines: readonly SeriesLine[], axis: CurvesOf["axis"], work: Work): Promise<Sheet> {
  const isOver = axis !== "step";
  const over = axis === "epoch" ? "epoch" : "time_s";
  const sheet = new Sheet(["branch", "step", ...(isOver ? [over] : []), metric, "state"]);
  const total = lines.reduce((sum, line) => sum + line.total, 0);
  for (const line of lines) {
    const rows = line.values.length < line.total ? await wholeLine(line, axis, sheet.rows, total, work) : line.uids.map((uid, index) => [line.steps[index]!, line.xs[index] ?? null, line.values[index] ?? null, uid] as const);
    for (const [step, x, value, uid] of rows) sheet.add([line.head, step, ...(isOver ? [x] : []), measured(value), uid]);
    work.say(sheet.rows, total);
  }
  return sheet;
}

/** Every point of a line that has more points than are drawn, the oldest first. */
async function wholeLine(line: SeriesLine, axis: CurvesOf["axis"], before: number, total: number, work: Work) {
  const drawn = new Map(line.uids.map((uid, index) => [uid, line.xs[index] ?? null]));
  const rows: (readonly [number, number | null, number | null, string])[] = [];
  await eachBefore(line.state, "uid,step,metrics,attributes,created_at", work, (state) => {
    const value = state.metrics[line.key];
    if (value === undefined) return;
    rows.push([state.step, axis === "epoch" ? epochOf(state, drawn.get(state.uid)) : Date.parse(state.created_at) / 1000, value, state.uid]);
    if (rows.length % 1_000 === 0) work.say(before + rows.length, total);
  });
  return rows.reverse();
}

const epochOf = (state: State, drawn: number | null | undefined): number | null => {
  const said = drawn ?? state.metrics["epoch"] ?? state.attributes["epoch"];
  return typeof said === "number" ? said : null;
};

export const tensorsOffer = (old: string, now: string, tensors: () => readonly TensorChange[]): Offer => ({
  title: "Changes of tensors", view: `diff-${shortUid(old)}-${shortUid(now)}`, metric: "", rank: PANEL, csv: () => tensorsSheet(tensors()),
});

export function histogramOffer(path: string, states: readonly [string, string], found: () => Histogram, isLog: () => boolean): Offer {
  const names = [`old ${shortUid(states[0])}`, `new ${shortUid(states[1])}`];
  return {
    title: `Histogram of ${path}`, view: "histogram", metric: path, rank: PANEL + 1,
    csv: () => histogramSheet(found(), names),
    svg: () => histogramFigure({ title: `Values of ${path}`, note: names.join(", "), found: found(), names, isLog: isLog() }, lightInk()),
  };
}

export const studyOffer = (study: string, metric: string | null): Offer => ({
  title: `Variants of ${study}`, view: `study-${study}`, metric: metric ?? "", rank: VIEW, csv: async (work) => studySheet(await getStudy(study, { limit: 2_000, ...(metric ? { metric } : {}) }, work.signal)),
});
