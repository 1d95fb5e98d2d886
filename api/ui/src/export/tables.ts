/** The page's tables as CSV. Pure: rows come in, cells go out. */
import { numberOf, type Axis } from "../compare/axes";
import type { TensorChange } from "../panels/diff/types";
import type { Mean } from "../panels/curves/groups";
import type { Branch, Comparison, GraphRow, Histogram, Parallels, State, Value } from "../lib/types";
import type { StudyDetail } from "../studies/types";
import { measured, Sheet, type Cell } from "./csv";

const unique = (names: readonly string[]): string[] => [...new Set(names)];

/** One row for each branch. Each setting has a column: what differs from the parent's, for a root everything. */
export function branchesSheet(items: readonly Branch[], metric: string | null, grouped: string): Sheet {
  const settings = unique(items.flatMap((one) => one.config.map((setting) => setting.key))).sort();
  const point = metric ?? "metric";
  const sheet = new Sheet([
    "branch", "life", "ending", "error", "study", "variant", ...(grouped ? [grouped] : []), "forked_from", "forked_at_step", "forked_at_state",
    ...["last", "best", "best_restorable"].flatMap((which) => [`${point}.${which}`, `${point}.${which}.step`, `${point}.${which}.state`]),
    ...settings.map((key) => `config.${key}`),
    "step", "head", "status", "states", "restorable", "durable", "bytes", "took_s", "steps_per_s", "began_at", "changed_at", "host",
  ]);
  for (const one of items) {
    const own = new Map(one.config.map((setting) => [setting.key, setting.value]));
    sheet.add([
      one.name, one.life, one.ending?.how, one.ending?.error, one.study, one.variant, ...(grouped ? [one.group as Value] : []), one.fork?.branch, one.fork?.step, one.fork?.state,
      ...[one.last, one.best, one.best_restorable].flatMap((at): Cell[] => (at ? [measured(at.value), at.step, at.state] : [null, null, null])),
      ...settings.map((key) => own.get(key)),
      one.step, one.head, one.status, one.states, one.restorable, one.durable, one.bytes, one.took_s, one.steps_per_s, one.began_at, one.changed_at, one.host,
    ]);
  }
  return sheet;
}

/** The columns of states: those of every state, then metrics, attributes and settings, with those that the table shows first. */
export interface StateColumns {
  metrics: readonly string[];
  attributes: readonly string[];
  config: readonly string[];
}

/** The names that a repository has, and those that are shown, by the ids of the table's columns. */
export function stateColumns(known: StateColumns, shown: readonly string[]): StateColumns {
  const chosen = (prefix: string) => shown.filter((id) => id.startsWith(prefix)).map((id) => id.slice(prefix.length));
  return { metrics: unique([...chosen("metrics."), ...known.metrics]), attributes: unique([...chosen("attr."), ...known.attributes]), config: unique(known.config) };
}

const STATE = ["uid", "step", "micro_step", "names", "status", "created_at", "message", "bytes_new", "bytes_total", "run", "parents"];

const stateHeader = ({ metrics, attributes, config }: StateColumns): string[] => [
  ...STATE, ...metrics.map((key) => `metrics.${key}`), ...attributes.map((key) => `attr.${key}`), ...config.map((key) => `config.${key}`),
];

function stateCells(state: State, names: readonly string[], { metrics, attributes, config }: StateColumns): Cell[] {
  return [
    state.uid, state.step, state.micro_step, names.join(" "), state.status, state.created_at, state.message, state.bytes_new, state.bytes_total, state.run, state.parents.join(" "),
    ...metrics.map((key) => measured(state.metrics[key])), ...attributes.map((key) => state.attributes[key] as Cell), ...config.map((key) => state.config?.[key] as Cell),
  ];
}

/** The table of states as a search finds them, and a function that adds one. */
export function statesSheet(columns: StateColumns): { sheet: Sheet; add: (state: State, names: readonly string[]) => void } {
  const sheet = new Sheet(stateHeader(columns));
  return { sheet, add: (state, names) => sheet.add(stateCells(state, names, columns)) };
}

/** Rows of the graph: a state, or a stretch of states, represented by its newest. */
export function graphSheet(columns: StateColumns): { sheet: Sheet; add: (row: GraphRow, branch: string | null) => void } {
  const sheet = new Sheet(["branch", "lane", "states", "restorable", "oldest", ...stateHeader(columns)]);
  const add = (row: GraphRow, branch: string | null) =>
    sheet.add([branch, row.lane, row.count, row.restorable, row.oldest ?? row.state.uid, ...stateCells(row.state, row.refs.map((ref) => ref.name), columns)]);
  return { sheet, add };
}

/** Branches by settings and metrics; `kept` are those within the chosen ranges. */
export function parallelsSheet(branches: Parallels["branches"], axes: readonly Axis[], kept: readonly boolean[]): Sheet {
  const sheet = new Sheet(["branch", "head", "step", "status", "chosen", ...axes.map((axis) => axis.key)]);
  branches.forEach((one, line) => sheet.add([one.branch, one.head, one.step, one.status, kept[line] ?? true, ...axes.map((axis) => axis.values[line])]));
  return sheet;
}

/** The points of a scatter plot. */
export function scatterSheet(names: readonly string[], across: Axis, upwards: Axis, kept: readonly boolean[]): Sheet {
  const sheet = new Sheet(["branch", "chosen", across.key, upwards.key]);
  names.forEach((name, line) => {
    const isThere = numberOf(across, across.values[line]) !== null && numberOf(upwards, upwards.values[line]) !== null;
    if (isThere) sheet.add([name, kept[line] ?? true, across.values[line], upwards.values[line]]);
  });
  return sheet;
}

/** States side by side: one row for each name, one column for each state. */
export function comparisonSheet(found: Comparison): Sheet {
  const sheet = new Sheet(["kind", "name", "differs", ...found.states.map((one) => one.rev)]);
  const of = (name: string, values: readonly Cell[]) => sheet.add(["state", name, unique(values.map(String)).length > 1, ...values]);
  of("uid", found.states.map((one) => one.state.uid));
  of("branch", found.states.map((one) => one.branch));
  of("step", found.states.map((one) => one.state.step));
  of("status", found.states.map((one) => one.state.status));
  of("places", found.states.map((one) => one.places.join(", ")));
  of("restorable", found.states.map((one) => one.nearest?.uid));
  for (const [kind, rows] of [["config", found.config], ["metric", found.metrics], ["attribute", found.attributes], ["code", found.code]] as const) {
    for (const row of rows) sheet.add([kind, row.key, row.differs, ...row.values.map((value) => cellOf(value))]);
  }
  return sheet;
}

const cellOf = (value: unknown): Cell => (value === null || ["string", "number", "boolean", "undefined"].includes(typeof value) ? (value as Cell) : JSON.stringify(value));

/** The tensors of a diff, in their present order. */
export function tensorsSheet(tensors: readonly TensorChange[]): Sheet {
  const sheet = new Sheet(["path", "change", "dtype", "shape", "old_dtype", "old_shape", "old_norm", "norm", "distance", "relative", "cosine", "largest", "largest_at", "fraction"]);
  for (const one of tensors) {
    sheet.add([
      one.path, one.change, one.dtype, one.shape.join("x"), one.old_dtype, one.old_shape?.join("x"), one.old_norm, one.norm, one.distance, one.relative, one.cosine, one.largest, one.at?.join(" "), one.fraction,
    ]);
  }
  return sheet;
}

/** The bins of a histogram. */
export function histogramSheet(found: Histogram, names: readonly string[]): Sheet {
  const sheet = new Sheet(["from", "to", ...names.map((name) => `${name}.count`)]);
  found.edges.slice(0, -1).forEach((edge, bin) => sheet.add([edge, found.edges[bin + 1], ...found.states.map((one) => one.counts[bin])]));
  return sheet;
}

/** Means of groups over an axis, with the band that is drawn around them. */
export function meansSheet(axis: string, metric: string, spread: "range" | "sigma", groups: readonly { name: string; mean: Mean }[]): Sheet {
  const [low, high] = spread === "range" ? ["least", "greatest"] : ["mean-sigma", "mean+sigma"];
  const sheet = new Sheet(["group", axis, `${metric}.mean`, low!, high!, "curves"]);
  for (const { name, mean } of groups) mean.xs.forEach((x, index) => sheet.add([name, x, mean.mean[index], mean.low[index], mean.high[index], mean.counts[index]]));
  return sheet;
}

/** The variants of a study. */
export function studySheet({ variants, metrics }: StudyDetail): Sheet {
  const settings = unique(variants.flatMap((one) => Object.keys(one.config))).sort();
  const sheet = new Sheet([
    "variant", "parent", "depth", "stage", "rank", "branch", "state", "step", "status", ...settings.map((key) => `config.${key}`), ...metrics.map((key) => `metrics.${key}`),
    "epoch", "epochs", "attempts", "states", "bytes", "took_s", "began_at", "changed_at", "alike", "error",
  ]);
  for (const one of variants) {
    sheet.add([
      one.name, one.parent, one.depth, one.stage, one.rank, one.branch, one.state, one.step, one.status,
      ...settings.map((key) => one.config[key] as Cell), ...metrics.map((key) => measured(one.metrics[key])),
      one.epoch, one.epochs, one.attempts, one.states, one.bytes, one.took_s, one.began_at, one.changed_at, one.alike.join(" "), one.error,
    ]);
  }
  return sheet;
}
