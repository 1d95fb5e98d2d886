/** Curves of one group, such as seeds, as their mean and its spread. Pure. */
import { rankOf } from "../../lib/ranks";
import type { SeriesLine, Value } from "../../lib/types";
import { placesOf, smooth, type Y } from "./points";
import type { Axis, BandKind } from "./settings.svelte";

export interface Group {
  name: string;
  lines: SeriesLine[];
}

export interface Mean {
  xs: number[];
  mean: number[];
  low: number[];
  high: number[];
  /** How many curves there are at each place. */
  counts: number[];
}

/** Lines by their group, in the order of its values: numbers, texts, none. */
export function groupsOf(lines: readonly SeriesLine[], by: string): Group[] {
  const found = new Map<string, { value: Value; lines: SeriesLine[] }>();
  for (const line of lines) {
    const value = (line.group ?? null) as Value;
    const key = JSON.stringify(value);
    found.set(key, { value, lines: [...(found.get(key)?.lines ?? []), line] });
  }
  const label = by.replace(/^(config|attr)\./, "");
  return [...found.values()]
    .sort((one, other) => order(one.value, other.value))
    .map(({ value, lines: members }) => ({ name: value === null ? `no ${label}` : `${label} ${value}`, lines: members }));
}

function order(one: Value, other: Value): number {
  const kind = (value: Value) => (value === null ? 2 : typeof value === "string" ? 1 : 0);
  if (kind(one) !== kind(other)) return kind(one) - kind(other);
  return typeof one === "string" ? one.localeCompare(String(other)) : Number(one) - Number(other);
}

/** The lines of a branch of several ranks: what each rank measured, or the branch's own value if none did. */
export function jobOf(line: SeriesLine, ranks: readonly SeriesLine[]): Group {
  const members = ranks.filter((one) => one.head === line.head);
  return { name: line.head, lines: members.length ? members : [line] };
}

/** The lines of single ranks, each under a name of its own. */
export const eachOf = (ranks: readonly SeriesLine[]): SeriesLine[] => ranks.map((line) => ({ ...line, head: `${line.head}, rank ${rankOf(line.key)}` }));

interface Dot {
  x: number;
  y: Y;
}

/** The mean of some lines, wherever one of them has a point. A line is straight between its own points; beyond its ends, and beside a gap, it does not count.
 With `factor` each line is smoothed first. */
export function meanOf(lines: readonly SeriesLine[], axis: Axis, spread: BandKind, factor = 0): Mean {
  const tracks = lines.map((line) => dotsOf(line, axis, factor));
  const xs = [...new Set(tracks.flat().map((dot) => dot.x))].sort((one, other) => one - other);
  const at = tracks.map(() => 0);
  const found: Mean = { xs: [], mean: [], low: [], high: [], counts: [] };
  for (const x of xs) {
    const values: number[] = [];
    tracks.forEach((track, number) => {
      while (at[number]! + 1 < track.length && track[at[number]! + 1]!.x <= x) at[number]! += 1;
      const value = between(track[at[number]!], track[at[number]! + 1], x);
      if (value !== null) values.push(value);
    });
    if (!values.length) continue;
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const [low, high] = spread === "range" ? [Math.min(...values), Math.max(...values)] : around(mean, values);
    found.xs.push(x);
    found.mean.push(mean);
    found.low.push(low);
    found.high.push(high);
    found.counts.push(values.length);
  }
  return found;
}

function dotsOf(line: SeriesLine, axis: Axis, factor: number): Dot[] {
  const values = factor > 0 ? smooth(line.values, factor) : line.values;
  const dots: Dot[] = [];
  placesOf(line, axis).forEach((x, index) => x !== null && dots.push({ x, y: values[index] }));
  dots.sort((one, other) => one.x - other.x); // stable: of several points at one place the last one counts
  return dots.filter((dot, index) => dots[index + 1]?.x !== dot.x);
}

function between(before: Dot | undefined, after: Dot | undefined, x: number): number | null {
  if (!before || before.x > x || typeof before.y !== "number") return null;
  if (before.x === x) return before.y;
  if (!after || typeof after.y !== "number") return null;
  return before.y + ((after.y - before.y) * (x - before.x)) / (after.x - before.x);
}

/** One standard deviation of the sample to each side; none for a single value. */
function around(mean: number, values: readonly number[]): [number, number] {
  if (values.length < 2) return [mean, mean];
  const sigma = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
  return [mean - sigma, mean + sigma];
}

/** Values along an axis that has further places. */
export function spreadOver(xs: readonly number[], at: readonly number[], values: readonly number[]): Y[] {
  const places = new Map(at.map((x, index) => [x, index]));
  return xs.map((x) => {
    const place = places.get(x);
    return place === undefined ? undefined : values[place];
  });
}
