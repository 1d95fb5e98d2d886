/** The texts in a row of the branches. Pure. */
import { formatValue } from "../lib/format";
import type { Branch } from "../lib/types";

const UNITS: readonly (readonly [number, string])[] = [[86_400, "d"], [3_600, "h"], [60, "min"]];

/** How long something took: `12 s`, `3.4 min`, `5.0 h`. */
export function formatTook(seconds: number): string {
  for (const [size, unit] of UNITS) if (seconds >= size) return `${(seconds / size).toFixed(seconds / size < 10 ? 1 : 0)} ${unit}`;
  return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

/** One setting that a branch changed: `lr 0.1 → 0.03`; for a root, or a new setting, only its value. */
export function settingText({ key, value, parent }: Branch["config"][number]): string {
  if (parent === null) return `${key} ${formatValue(value)}`;
  return `${key} ${formatValue(parent)} → ${value === null ? "gone" : formatValue(value)}`;
}

/** The settings that a row shows: those in which the listed branches differ, what the branch itself changed first. If it is listed alone, what it changed. */
export function settingsOf({ config, settings, fork }: Pick<Branch, "config" | "settings" | "fork">): Branch["config"] {
  const changed = fork ? config.filter((one) => one.key in settings || !Object.keys(settings).length) : [];
  const others = Object.keys(settings).sort().filter((key) => !changed.some((one) => one.key === key));
  return [...changed, ...others.map((key) => ({ key, value: settings[key] ?? null, parent: null }))];
}

export type Line = Branch["line"];
type Range = readonly [number, number];

/** The numbers of a line, without those that are NaN or infinite. */
const numbersOf = (line: Line): number[] => line.values.filter((value): value is number => value !== null);

/** Whether a training diverged: its newest value is NaN or infinite; or, of a metric that should fall, more than ten times as large as all that it began with and
 reached. */
export function isDiverged({ last, best, line }: Pick<Branch, "last" | "best" | "line">, direction: "min" | "max"): boolean {
  if (!last) return false;
  if (last.value === null) return true;
  const began = numbersOf(line)[0];
  return direction === "min" && began !== undefined && best?.value != null && last.value > FAR * Math.max(Math.abs(began), Math.abs(best.value));
}
const FAR = 10;

/** The range of the values of some lines; null if they have none. */
export function rangeOf(lines: readonly Line[]): Range | null {
  const values = lines.flatMap(numbersOf);
  return values.length ? [values.reduce((one, other) => Math.min(one, other)), values.reduce((one, other) => Math.max(one, other))] : null;
}

/** A line as a path in a box of this size, over a range of values or its own; empty unless there are at least two numbers. `gaps` marks the values that are NaN or
 infinite. What is outside of the range is drawn at its edge. */
export function pathOf(line: Line, width: number, height: number, range: Range | null = null): { path: string; gaps: string } {
  const [low, high] = range ?? rangeOf([line]) ?? [0, 0];
  const [left, right] = [line.steps[0] ?? 0, line.steps.at(-1) ?? 0];
  const x = (step: number) => (1 + ((step - left) / Math.max(1e-12, right - left)) * (width - 2)).toFixed(1);
  const y = (value: number) => (high === low ? height / 2 : Math.max(2, Math.min(height - 2, 2 + ((high - value) / (high - low)) * (height - 4)))).toFixed(1);
  const points = line.steps.flatMap((step, index) => (line.values[index] == null ? [] : [`${x(step)} ${y(line.values[index]!)}`]));
  const gaps = line.steps.filter((_, index) => line.values[index] == null);
  return { path: points.length < 2 ? "" : `M${points.join("L")}`, gaps: gaps.map((step) => `M${x(step)} 1V${height - 1}`).join("") };
}

/** The order after a click on a header: first the usual direction, then reversed, then the usual order of all rows. */
export function nextBy(by: string, sort: string): string {
  return by === sort ? `-${sort}` : by === `-${sort}` ? "" : sort;
}

const ENDED: Readonly<Record<string, string>> = {
  ended: "its training has ended",
  failed: "its training failed",
  interrupted: "its training was interrupted",
  killed: "its process was killed: it ended without closing",
};

/** What is known of a branch's training: whether its process runs, or how it ended. */
export function lifeText({ life, ending }: Pick<Branch, "life" | "ending">): string {
  if (!ending) return LIFE_MEANS[life] ?? life;
  const said = `${ENDED[ending.how] ?? ending.how}${ending.step == null ? "" : ` at step ${ending.step}`}`;
  return ending.error ? `${said}: ${ending.error}` : said;
}

export const LIFE_MEANS: Readonly<Record<string, string>> = {
  running: "its process runs",
  ended: "its process has ended",
  unknown: "whether its process runs cannot be told from here",
};
