/** Places on the axis as texts. Pure. */
import { formatNumber, formatTime } from "../../lib/format";
import type { Axis } from "./settings.svelte";

const UNITS: readonly (readonly [number, string])[] = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];

/** An elapsed time: `2 d 4 h`, `12 min`, `0.5 s`. */
export function sayElapsed(seconds: number): string {
  const size = Math.abs(seconds);
  const at = UNITS.findIndex(([unit]) => size >= unit);
  if (at < 0) return size ? `${formatNumber(seconds)} s` : "0";
  const [unit, name] = UNITS[at]!;
  const whole = Math.floor(size / unit);
  const next = UNITS[at + 1];
  const rest = next ? Math.floor((size - whole * unit) / next[0]) : 0;
  const sign = seconds < 0 ? "−" : "";
  if (!next) return `${sign}${Number.isInteger(size) ? size : formatNumber(size)} s`;
  return `${sign}${whole} ${name}${rest ? ` ${rest} ${next[1]}` : ""}`;
}

/** A place on an axis, as shown for a point: `step 40`, `12 min`, `2026-11-23 01:02:03`. */
export function sayPlace(x: number, axis: Axis): string {
  if (axis === "elapsed") return `after ${sayElapsed(x)}`;
  if (axis === "time") return formatTime(new Date(x * 1000).toISOString());
  return `${axis} ${formatNumber(x)}`;
}

export const AXES: Readonly<Record<Axis, string>> = { step: "step", time: "time", elapsed: "time since it began", epoch: "epoch" };
