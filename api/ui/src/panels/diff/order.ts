/** Which rows of a diff are shown, and in what order. Pure. */
import type { Change, TensorChange } from "./types";

export type Column = "path" | "change" | "old_norm" | "norm" | "distance" | "relative" | "cosine" | "largest" | "fraction";

export interface Wanted {
  filter: string;
  withSame: boolean;
  /** Also single numbers, such as optimizers' step counts: there are many of them, and they change most. */
  withScalars: boolean;
  column: Column;
  descending: boolean;
}

const RANK: Record<Change, number> = { removed: 0, added: 1, recast: 2, changed: 3, unread: 4, same: 5 };

/** The matching rows, sorted; rows without a number in the column come last in either direction. */
export function arrange(tensors: readonly TensorChange[], wanted: Wanted): TensorChange[] {
  const filter = wanted.filter.toLowerCase();
  const fits = (one: TensorChange) => (wanted.withSame || one.change !== "same") && (wanted.withScalars || !isScalar(one));
  const fitting = tensors.filter((one) => fits(one) && one.path.toLowerCase().includes(filter));
  const sign = wanted.descending ? -1 : 1;
  return fitting.sort((one, other) => compare(one, other, wanted.column, sign) || one.path.localeCompare(other.path));
}

function compare(one: TensorChange, other: TensorChange, column: Column, sign: number): number {
  if (column === "path") return sign * one.path.localeCompare(other.path);
  if (column === "change") return sign * (RANK[one.change] - RANK[other.change]);
  const [left, right] = [one[column], other[column]];
  if (left === null || right === null) return Number(left === null) - Number(right === null);
  return sign * (left - right);
}

export const isScalar = (one: TensorChange): boolean => one.shape.every((size) => size === 1);

/** How many tensors became what, the most telling first; zeros are left out. */
export function counts(tensors: readonly TensorChange[]): [Change, number][] {
  const found = new Map<Change, number>();
  for (const { change } of tensors) found.set(change, (found.get(change) ?? 0) + 1);
  return (["changed", "unread", "added", "removed", "recast", "same"] as const).filter((change) => found.has(change)).map((change) => [change, found.get(change)!]);
}

/** The length of a bar, from 0 to 1: logarithmic, since relative changes differ by many orders; 1e-6 of the largest counts as nothing. */
export function barLength(value: number | null, largest: number): number {
  if (value === null || value <= 0 || largest <= 0) return 0;
  return Math.max(0, 1 + Math.log10(value / largest) / 6);
}

/** The difference of two metrics, if both are numbers. */
export function delta(old: unknown, now: unknown): number | null {
  return typeof old === "number" && typeof now === "number" ? now - old : null;
}
