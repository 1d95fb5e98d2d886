/** Curves as numbers: over one axis, smoothed, and the values shown beside them. Pure. */
import type { SeriesLine } from "../../lib/types";
import type { Axis } from "./settings.svelte";

export type Y = number | null | undefined;

/** What a chart draws: all places of all lines, and each line over them. `undefined` means no point, null a point that is not a number. */
export interface Aligned {
  xs: number[];
  values: Y[][];
  /** For each line the uid at each place, where it has a point. */
  uids: (string | undefined)[][];
}

/** Each line with the steps that its branch lost after it: they have its colour. */
export const withLost = (lines: readonly SeriesLine[], lost: readonly SeriesLine[]): SeriesLine[] =>
  lines.flatMap((line) => [line, ...lost.filter((part) => part.head === line.head && part.key === line.key)]);

/** The name of a line in the legend. */
export const titleOf = (line: SeriesLine, lost: readonly SeriesLine[]): string => (lost.includes(line) ? `${line.head}, lost` : line.head);

/** The places of a line's points; null where they are unknown. Elapsed time counts from where the branch's own states begin; what the branch shares with others
 before that is left out. */
export function placesOf(line: SeriesLine, axis: Axis): readonly (number | null)[] {
  if (axis === "step") return line.steps;
  if (axis !== "elapsed") return line.xs;
  const began = line.began ?? line.xs[0] ?? 0;
  return line.xs.map((x) => (x === null || x < began ? null : x - began));
}

/** Keeps the last of several points of one line at the same place. */
export function align(lines: readonly SeriesLine[], axis: Axis = "step"): Aligned {
  const all = lines.map((line) => placesOf(line, axis));
  const xs = [...new Set(all.flat())].filter((x) => x !== null).sort((one, other) => one - other);
  const places = new Map(xs.map((x, index) => [x, index]));
  const values = lines.map(() => new Array<Y>(xs.length).fill(undefined));
  const uids = lines.map(() => new Array<string | undefined>(xs.length).fill(undefined));
  lines.forEach((line, number) => {
    all[number]!.forEach((x, index) => {
      if (x === null) return;
      const place = places.get(x)!;
      values[number]![place] = line.values[index] ?? null;
      uids[number]![place] = line.uids[index];
    });
  });
  return { xs, values, uids };
}

/** How many points have no place because their epoch is unknown. */
export const homeless = (lines: readonly SeriesLine[], axis: Axis): number => (axis === "epoch" ? lines.reduce((sum, line) => sum + line.xs.filter((x) => x === null).length, 0) : 0);

/** The values of some lines that are NaN or infinite, in their order along the axis. */
export function gapsOf(lines: readonly SeriesLine[], axis: Axis): { head: string; x: number; step: number; uid: string }[] {
  const found = lines.flatMap((line) => placesOf(line, axis).map((x, index) => ({ head: line.head, x: line.values[index] === null ? x : null, step: line.steps[index]!, uid: line.uids[index]! })));
  return found.flatMap((one) => (one.x === null ? [] : [{ ...one, x: one.x }])).sort((one, other) => one.x - other.x);
}

/** Exponential moving average with weight `factor` for earlier values, corrected at its beginning; gaps are skipped. */
export function smooth(values: readonly Y[], factor: number): Y[] {
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
}

export interface Point {
  step: number;
  value: number;
  uid: string;
}

/** The last and the best point of a line; null if it has no number at all. */
export function ends(line: SeriesLine, aim: "min" | "max"): { last: Point; best: Point } | null {
  let last: Point | null = null;
  let best: Point | null = null;
  line.values.forEach((value, index) => {
    if (value === null) return;
    last = { step: line.steps[index]!, value, uid: line.uids[index]! };
    if (best === null || (aim === "min" ? value < best.value : value > best.value)) best = last;
  });
  return last && best ? { last, best } : null;
}

/** The value of a line at a place, or the nearest one before it. */
export function valueAt(values: readonly Y[], place: number): number | null {
  for (let index = Math.min(place, values.length - 1); index >= 0; index--) {
    const value = values[index];
    if (value !== undefined) return value;
  }
  return null;
}

/** The place with a point of this line that is nearest to `place`; -1 when the line is empty. */
export function nearestPlace(values: readonly Y[], place: number): number {
  for (let away = 0; away < values.length; away++) {
    if (typeof values[place - away] === "number") return place - away;
    if (typeof values[place + away] === "number") return place + away;
  }
  return -1;
}

/** Dashes for lines of the same colour: the first is solid. */
export function dashes(colours: readonly number[]): number[][] {
  const kinds = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
  const seen = new Map<number, number>();
  return colours.map((colour) => {
    const before = seen.get(colour) ?? 0;
    seen.set(colour, before + 1);
    return kinds[before % kinds.length]!;
  });
}
