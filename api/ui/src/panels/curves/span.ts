/** The range of values that an axis makes room for, so that a few far ones do not flatten all others. Pure. */
import type { Y } from "./points";
import type { Span } from "./settings.svelte";

export interface Seen {
  low: number;
  high: number;
  /** The numbers of the lines with points outside. */
  lines: number[];
  /** How many points are outside. */
  outside: number;
  /** The central percents that are shown; null if the range was found automatically. */
  percent: number | null;
}

const STRETCH = 3;
const FAR = 10;
const MARGIN = 0.05;
const AUTO = 98;

/** The visible range of lines whose places are from `from` to before `to`.

 With `auto` the axis leaves out lines that are ten times as far away as most lines are high, if these are fewer than half, and then far values
 if they would take more than two thirds of it. */
export function seenOf(lines: readonly (readonly Y[])[], from: number, to: number, span: Span, isLog: boolean): Seen | null {
  const put = isLog ? Math.log : (value: number) => value;
  const back = isLog ? Math.exp : (value: number) => value;
  const windows = lines.map((line) => sortedOf(line.slice(from, to), put, isLog));
  const all = joined(windows);
  if (!all.length) return null;
  const [least, most] = widen(all[0]!, all.at(-1)!);
  const [first, last] = span === "all" ? [least, most] : span === "auto" ? usual(windows) : central(all, Number(span));
  const [low, high] = [Math.max(first, least), Math.min(last, most)];
  const beyond = windows.map((window) => window.reduce((sum, value) => sum + Number(value < low || value > high), 0));
  return {
    low: back(low), high: back(high),
    outside: beyond.reduce((sum, count) => sum + count, 0),
    lines: beyond.flatMap((count, number) => (count ? [number] : [])),
    percent: span === "auto" || span === "all" ? null : Number(span),
  };
}

function usual(windows: readonly Float64Array[]): [number, number] {
  const some = windows.filter((window) => window.length);
  const spans = some.map((window) => [quantile(window, 0.01), quantile(window, 0.99)] as const);
  const [low, high] = [median(spans.map((one) => one[0])), median(spans.map((one) => one[1]))];
  const room = FAR * Math.max(high - low, Math.abs(high) * MARGIN);
  const near = joined(some.filter((_, number) => spans[number]![0] >= low - room && spans[number]![1] <= high + room));
  const [least, most] = widen(near[0]!, near.at(-1)!);
  const [first, last] = central(near, AUTO);
  return most - least <= STRETCH * (last - first) ? [least, most] : [first, last];
}

const central = (sorted: Float64Array, percent: number): [number, number] => widen(quantile(sorted, (100 - percent) / 200), quantile(sorted, (100 + percent) / 200));
const median = (values: readonly number[]): number => quantile(Float64Array.from(values).sort(), 0.5);
const sortedOf = (line: readonly Y[], put: (value: number) => number, isLog: boolean) =>
  Float64Array.from(line.filter((value): value is number => typeof value === "number" && (!isLog || value > 0)), put).sort();

function joined(parts: readonly Float64Array[]): Float64Array {
  const all = new Float64Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all.sort();
}

function quantile(sorted: Float64Array, share: number): number {
  const at = share * (sorted.length - 1);
  const [below, above] = [sorted[Math.floor(at)]!, sorted[Math.ceil(at)]!];
  return below + (above - below) * (at - Math.floor(at));
}

/** A small margin on both sides, and some range if all values are the same. */
function widen(low: number, high: number): [number, number] {
  const more = high > low ? MARGIN * (high - low) : Math.max(Math.abs(low) * MARGIN, 1e-9);
  return [low - more, high + more];
}
