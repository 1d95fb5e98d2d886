/** The columns that the table can show. An id is a field of the search grammar where there is one, so that a header can sort by it. */
import { formatAge, formatBytes, formatNumber, formatTime, formatValue, isGone, shortUid } from "../lib/format";
import { fieldsOf, quoteKey } from "../lib/query";
import { withoutRanks } from "../lib/ranks";
import { byRelevance, relevantKeys } from "../lib/relevance";
import type { State, Stats } from "../lib/types";

export interface Column {
  id: string;
  title: string;
  /** A width of a CSS grid. */
  width: string;
  isNumber: boolean;
  /** The name in `order by`; null if it cannot be sorted by. */
  sortBy: string | null;
}

const FIXED: Readonly<Record<string, Omit<Column, "id">>> = {
  refs: { title: "Names", width: "minmax(110px, 1.4fr)", isNumber: false, sortBy: null },
  step: { title: "Step", width: "76px", isNumber: true, sortBy: "step" },
  status: { title: "Status", width: "96px", isNumber: false, sortBy: "status" },
  age: { title: "Age", width: "68px", isNumber: true, sortBy: "created" },
  message: { title: "Message", width: "minmax(120px, 2fr)", isNumber: false, sortBy: "message" },
  uid: { title: "Uid", width: "86px", isNumber: false, sortBy: "uid" },
  bytes: { title: "New bytes", width: "86px", isNumber: true, sortBy: null },
};

/** The columns that are shown unless others were chosen: those that the filter or the sort uses, then the most relevant ones. */
export function defaultColumns(stats: Stats | null, isNarrow: boolean, query = ""): string[] {
  const asked = fieldsOf(query, stats ?? {}).filter((id) => id.startsWith("metrics.") || id.startsWith("attr."));
  const whole = new Set(withoutRanks((stats?.metrics ?? []).map((one) => one.key)));
  const rest = (stats?.metrics ?? []).filter((one) => whole.has(one.key) && !asked.includes(`metrics.${one.key}`));
  const shown = [...asked, ...relevantKeys(rest, Math.max(0, (isNarrow ? 1 : 3) - asked.length)).map((key) => `metrics.${key}`)];
  return isNarrow ? ["refs", "step", ...shown.slice(0, 1)] : ["refs", "step", ...shown, "status", "age", "message"];
}

/** Every column that can be chosen. */
export function allColumns(stats: Stats | null): string[] {
  return [
    ...Object.keys(FIXED),
    ...byRelevance((stats?.metrics ?? []).map((one) => one.key)).map((key) => `metrics.${key}`),
    ...(stats?.attributes ?? []).map((key) => `attr.${key}`),
  ];
}

export function columnOf(id: string): Column {
  const fixed = FIXED[id];
  if (fixed) return { id, ...fixed };
  const [prefix, key] = split(id);
  const isMetric = prefix === "metrics";
  return { id, title: key, width: isMetric ? "minmax(84px, 0.6fr)" : "minmax(84px, 0.8fr)", isNumber: isMetric, sortBy: `${prefix}.${quoteKey(key)}` };
}

/** The text of a column for a state; names are not text but chips, and made elsewhere. */
export function textOf(id: string, state: State, now: number): string {
  switch (id) {
    case "step":
      return state.micro_step ? `${state.step}+${state.micro_step}` : String(state.step);
    case "status":
      return state.status;
    case "age":
      return formatAge(state.created_at, now);
    case "message":
      return state.message ?? "";
    case "uid":
      return shortUid(state.uid);
    case "bytes":
      return isGone(state.status) ? "–" : formatBytes(state.bytes_new);
  }
  const [prefix, key] = split(id);
  if (prefix === "metrics") return formatNumber(state.metrics[key]);
  const value = state.attributes[key];
  return value === undefined ? "" : formatValue(value);
}

/** The text on pointing at a cell: the value in full. */
export function titleOf(id: string, state: State): string {
  if (id === "age") return formatTime(state.created_at);
  if (id === "uid") return state.uid;
  if (id === "bytes" && isGone(state.status)) return `nothing is stored: ${state.status}`;
  if (id.startsWith("metrics.")) return String(state.metrics[split(id)[1]] ?? "");
  return textOf(id, state, 0);
}

function split(id: string): [string, string] {
  const dot = id.indexOf(".");
  return [id.slice(0, dot), id.slice(dot + 1)];
}
