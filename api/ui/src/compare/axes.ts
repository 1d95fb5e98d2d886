/** Axes of settings and metrics: their scales, the positions of values, the chosen ranges. Pure. */
import type { Parallels, Value } from "../lib/types";

export type AxisData = Parallels["axes"][number];

export interface Axis {
  key: string;
  /** The name without the prefix for its kind. */
  label: string;
  kind: "setting" | "metric";
  values: readonly Value[];
  varies: boolean;
  /** Which values of a metric are better. */
  direction: "min" | "max" | null;
  isLog: boolean;
  /** The values of an axis without numbers, in order; null on a numeric axis. */
  categories: readonly string[] | null;
  /** Its ends: numbers, or the first and the last place of a category. */
  low: number;
  high: number;
}

/** The chosen range of an axis: from one number to another; for categories, their places. */
export interface Range {
  key: string;
  low: number;
  high: number;
}

export interface Tick {
  place: number;
  text: string;
}

const FEW = 7; // values that all get a tick
const MANY = 12; // with more values than this, lines through one of them are not set apart
const APART = 0.055; // of an axis, between two ticks
const LOG_SPAN = 10;

export function makeAxis(data: AxisData): Axis {
  const known = data.values.filter((value) => value !== null);
  const isNumber = known.length > 0 && known.every((value) => typeof value === "number");
  const numbers = isNumber ? (known as number[]) : [];
  const categories = isNumber ? null : [...new Set(known.map(String))].sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
  return {
    key: data.key,
    label: data.key.replace(/^(config|metrics)\./, ""),
    kind: data.kind,
    values: data.values,
    varies: data.varies,
    direction: data.direction ?? null,
    isLog: isLogSpaced(numbers),
    categories,
    low: categories ? 0 : Math.min(...numbers),
    high: categories ? Math.max(0, categories.length - 1) : Math.max(...numbers),
  };
}

/** Whether the gaps between values are more alike on a logarithmic scale: 0.001, 0.01, 0.1. */
export function isLogSpaced(values: readonly number[]): boolean {
  const sorted = [...new Set(values)].sort((one, other) => one - other);
  if (sorted.length < 3 || sorted[0]! <= 0 || sorted.at(-1)! / sorted[0]! < LOG_SPAN) return false;
  return unevenness(sorted.map(Math.log)) < unevenness(sorted);
}

function unevenness(sorted: readonly number[]): number {
  const gaps = sorted.slice(1).map((value, index) => value - sorted[index]!);
  const mean = gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length;
  return Math.sqrt(gaps.reduce((sum, gap) => sum + (gap - mean) ** 2, 0) / gaps.length) / mean;
}

/** The number for a value on an axis: the value itself, or the place of its category; null if there is none. */
export function numberOf(axis: Axis, value: Value | undefined): number | null {
  if (value === null || value === undefined) return null;
  if (axis.categories === null) return typeof value === "number" ? value : null;
  const place = axis.categories.indexOf(String(value));
  return place < 0 ? null : place;
}

/** The position of a number, from 0 at the low end to 1. */
export function placeOf(axis: Axis, at: number): number {
  if (axis.high <= axis.low) return 0.5;
  const [value, low, high] = axis.isLog ? [Math.log(at), Math.log(axis.low), Math.log(axis.high)] : [at, axis.low, axis.high];
  return (value - low) / (high - low);
}

/** The number at a position: the inverse. */
export function numberAt(axis: Axis, place: number): number {
  const part = Math.max(0, Math.min(1, place));
  if (axis.isLog) return Math.exp(Math.log(axis.low) + part * (Math.log(axis.high) - Math.log(axis.low)));
  return axis.low + part * (axis.high - axis.low);
}

/** A number as a person would type it: up to four digits, without trailing zeros. */
export function numberText(value: number): string {
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(4)));
  return text.replace(/\.?0*e\+?/, "e");
}

/** A number without an exponent, as ARIA asks. */
export const decimal = (value: number): string => value.toLocaleString("en-US", { useGrouping: false, maximumFractionDigits: 20 });

export const textOf = (axis: Axis, at: number): string => (axis.categories ? (axis.categories[Math.round(at)] ?? "") : numberText(at));

export const valueText = (value: Value | undefined): string => (value === null || value === undefined ? "none" : typeof value === "number" ? numberText(value) : String(value));

/** The values that occur on an axis, rising. */
export function stops(axis: Axis): number[] {
  const found = new Set(axis.values.map((value) => numberOf(axis, value)).filter((value) => value !== null));
  return [...found].sort((one, other) => one - other);
}

/** The values of an axis that has few, else round numbers; none so close to another that they could not be read. */
export function ticks(axis: Axis): Tick[] {
  const own = stops(axis);
  if (!own.length) return [];
  const wanted = axis.categories || own.length <= FEW ? own : axis.isLog ? logTicks(axis) : linearTicks(axis);
  const shown: Tick[] = [];
  for (const at of wanted) {
    const place = placeOf(axis, at);
    const last = shown.at(-1);
    if (!last || place - last.place >= APART) shown.push({ place, text: textOf(axis, at) });
  }
  return shown;
}

function linearTicks({ low, high }: Axis): number[] {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((by) => by * power >= rough) ?? 10);
  const found: number[] = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + Number.EPSILON) && found.length < 12; at += 1) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function logTicks({ low, high }: Axis): number[] {
  const found: number[] = [];
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const parts = last - first > 3 ? [1] : [1, 2, 5];
  for (let power = first; power <= last; power += 1) for (const part of parts) found.push(Number(`${part}e${power}`));
  return found.filter((at) => at >= low * (1 - 1e-9) && at <= high * (1 + 1e-9));
}

/** Which of these lines have a value in every range. */
export function within(axes: readonly Axis[], ranges: readonly Range[], count: number): boolean[] {
  const chosen = ranges.flatMap((range) => axes.filter((axis) => axis.key === range.key).map((axis) => ({ axis, ...range })));
  return Array.from({ length: count }, (_, line) =>
    chosen.every(({ axis, low, high }) => {
      const at = numberOf(axis, axis.values[line]);
      return at !== null && at >= low - Math.abs(low) * 1e-9 && at <= high + Math.abs(high) * 1e-9;
    }),
  );
}

/** The axes that are drawn by default: those that vary, settings before metrics; metrics come with the most relevant first. */
export function usualAxes(axes: readonly Axis[]): Axis[] {
  const varying = axes.filter((axis) => axis.varies);
  return [...varying.filter((axis) => axis.kind === "setting").slice(0, 8), ...varying.filter((axis) => axis.kind === "metric").slice(0, 3)];
}

/**
 * The position where each line crosses an axis, null where it has no value. Lines through one of few values are set apart a little, in the
 * order of `by`, so that sixty lines through three values can still be told apart.
 */
export function crossings(axis: Axis, by: readonly (number | null)[]): (number | null)[] {
  const numbers = axis.values.map((value) => numberOf(axis, value));
  const own = stops(axis);
  const places = numbers.map((at) => (at === null ? null : placeOf(axis, at)));
  if (own.length > MANY || own.length >= numbers.length) return places;
  const at = own.map((one) => placeOf(axis, one));
  const gap = Math.min(...at.slice(1).map((place, index) => place - at[index]!), 0.16);
  const most = Math.max(...own.map((one) => numbers.filter((number) => number === one).length));
  for (const one of own) {
    const lines = numbers.flatMap((number, line) => (number === one ? [line] : []));
    lines.sort((left, right) => (by[left] ?? Infinity) - (by[right] ?? Infinity) || left - right);
    const band = gap * 0.5 * (lines.length / most);
    lines.forEach((line, index) => {
      places[line] = places[line]! + ((index + 0.5) / lines.length - 0.5) * band;
    });
  }
  return places;
}
