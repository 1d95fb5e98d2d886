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

/** The points of a curve as a path in a box of this size; null unless there are at least two numbers. */
export function pathOf(steps: readonly number[], values: readonly (number | null)[], width: number, height: number): string | null {
  const points = steps.map((step, index) => [step, values[index]] as const).filter((one): one is readonly [number, number] => typeof one[1] === "number" && Number.isFinite(one[1]));
  if (points.length < 2) return null;
  const [left, right] = [points[0]![0], points.at(-1)![0]];
  const [low, high] = [Math.min(...points.map((one) => one[1])), Math.max(...points.map((one) => one[1]))];
  const x = (step: number) => 1 + ((step - left) / Math.max(1e-12, right - left)) * (width - 2);
  const y = (value: number) => (high === low ? height / 2 : 2 + ((high - value) / (high - low)) * (height - 4));
  return points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
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
