/** Curves as numbers: aligned by step, smoothed, and what is said of them beside. Pure. */
import type { SeriesLine } from "../../lib/types";

export type Y = number | null | undefined;

/** What a chart draws: all steps of all lines, and each line over them. `undefined` is no point, null one that is not a number. */
export interface Aligned {
  steps: number[];
  values: Y[][];
  /** For each line the uid at each step, where it has a point. */
  uids: (string | undefined)[][];
}

export function align(lines: readonly SeriesLine[]): Aligned {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((one, other) => one - other);
  const places = new Map(steps.map((step, index) => [step, index]));
  const values = lines.map(() => new Array<Y>(steps.length).fill(undefined));
  const uids = lines.map(() => new Array<string | undefined>(steps.length).fill(undefined));
  lines.forEach((line, number) => {
    line.steps.forEach((step, index) => {
      const place = places.get(step)!;
      values[number]![place] = line.values[index] ?? null;
      uids[number]![place] = line.uids[index];
    });
  });
  return { steps, values, uids };
}

/** Exponential moving average with weight `factor` of what was before, corrected for its beginning; gaps are stepped over. */
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

/** The last and the best point of a line; null when it has no number at all. */
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

