/** Round places on an axis between two ends. Pure. */
import { formatTime } from "../../lib/format";
import { numberText } from "../../compare/axes";
import { sayElapsed } from "../../panels/curves/ticks";
import type { Axis } from "../../panels/curves/settings.svelte";

export interface Mark {
  at: number;
  text: string;
}

const PARTS = [1, 2, 5, 10];
const SPANS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

export function linearMarks(low: number, high: number, about = 6): Mark[] {
  if (!(high > low)) return [{ at: low, text: numberText(low) }];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (PARTS.find((part) => part * power >= rough) ?? 10);
  return multiples(low, high, step).map((at) => ({ at, text: numberText(Number(at.toPrecision(12))) }));
}

/** Powers of ten, with values in between where there are few; round numbers if those are too few as well. */
export function logMarks(low: number, high: number): Mark[] {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const parts = last - first > 4 ? [1] : [1, 2, 5];
  const found: Mark[] = [];
  for (let power = first; power <= last; power += 1) for (const part of parts) found.push({ at: Number(`${part}e${power}`), text: numberText(Number(`${part}e${power}`)) });
  const inside = found.filter(({ at }) => at >= low * (1 - 1e-9) && at <= high * (1 + 1e-9));
  return inside.length > 2 ? inside : linearMarks(low, high).filter(({ at }) => at > 0);
}

/** Ticks for the axis of curves: steps are whole, times are round in this time zone. */
export function axisMarks(low: number, high: number, axis: Axis, about = 7): Mark[] {
  if (axis === "step") return linearMarks(low, high, about).filter(({ at }) => Number.isInteger(at));
  if (axis === "epoch") return linearMarks(low, high, about);
  const rough = (high - low) / about;
  const step = SPANS_S.find((span) => span >= rough) ?? Math.ceil(rough / 86_400) * 86_400;
  if (axis === "elapsed") return rough < 1 ? linearMarks(low, high, about).map(({ at }) => ({ at, text: at ? `${numberText(at)} s` : "0" })) : multiples(low, high, step).map((at) => ({ at, text: sayElapsed(at) }));
  const zone = new Date(low * 1000).getTimezoneOffset() * 60;
  return multiples(low - zone, high - zone, step).map((at) => ({ at: at + zone, text: timeText(at + zone, step) }));
}

/** The day if ticks are days apart, else the time, to the second if needed. */
function timeText(at: number, step: number): string {
  const text = formatTime(new Date(at * 1000).toISOString());
  return step >= 86_400 ? text.slice(0, 10) : step >= 43_200 ? text.slice(5, 16) : step >= 60 ? text.slice(5, 16) : text.slice(11);
}

function multiples(low: number, high: number, step: number): number[] {
  const found: number[] = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9 && found.length < 40; at += 1) found.push(at * step || 0);
  return found;
}
