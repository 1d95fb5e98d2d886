/** What is compared, and how; kept in the address. */
import { inAddress, list, oneOf, text, type Kind } from "../lib/own.svelte";
import type { Range } from "./axes";

const MOST = 24;

export const ranges: Kind<readonly Range[]> = {
  default: [],
  read: (said) => {
    const found = said.split(",").slice(0, MOST).map(readRange);
    return found.filter((one) => one !== null);
  },
  write: (value) => value.map(({ key, low, high }) => `${encodeURIComponent(key)}~${low}~${high}`).join(","),
};

function readRange(said: string): Range | null {
  const [key = "", low = "", high = ""] = said.split("~");
  try {
    const range = { key: decodeURIComponent(key), low: Number(low), high: Number(high) };
    return key && low && high && range.low <= range.high ? range : null;
  } catch {
    return null;
  }
}

/** Keys of axes, in order; none: the default axes. */
export const axesShown = inAddress("compare.axes", list(MOST));
export const brushed = inAddress("compare.ranges", ranges);
/** `branch`, or the key of an axis; empty: the first metric. */
export const colouredBy = inAddress("compare.colour", text());
export const across = inAddress("compare.x", text());
export const upwards = inAddress("compare.y", text());
export const taken = inAddress("compare.taken", oneOf("best", "last"));
/** Revisions of the states that are shown side by side. */
export const beside = inAddress("compare.beside", list(32));

/** Choose a range on an axis; null: all of it. */
export function brush(key: string, range: Omit<Range, "key"> | null): void {
  const others = brushed.value.filter((one) => one.key !== key);
  brushed.set(range === null ? others : [...others, { key, ...range }]);
}

/** Adds a state to the comparison, or removes it. */
export function toggle(rev: string): void {
  beside.set(beside.value.includes(rev) ? beside.value.filter((one) => one !== rev) : [...beside.value, rev]);
}
