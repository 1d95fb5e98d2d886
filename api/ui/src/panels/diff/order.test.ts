import { expect, it } from "vitest";
import { arrange, barLength, counts, delta, type Wanted } from "./order";
import type { Change, TensorChange } from "./types";

const tensor = (path: string, change: Change, relative: number | null = null): TensorChange => ({
  path, change, shape: [2], dtype: "float32", old_shape: null, old_dtype: null, old_norm: null, norm: null, distance: null, cosine: null, largest: null, at: null,
  fraction: null, relative,
});
const wanted: Wanted = { filter: "", withSame: false, withScalars: false, column: "relative", descending: true };
const all = [tensor("b", "changed", 0.1), tensor("a", "same"), tensor("d", "added"), tensor("c", "changed", 0.5)];
const paths = (asked: Partial<Wanted>) => arrange(all, { ...wanted, ...asked }).map((one) => one.path);

it("shows the most changed first, without those that are the same", () => {
  expect(paths({})).toEqual(["c", "b", "d"]);
});

it("keeps what has no number last in both directions", () => {
  expect(paths({ descending: false })).toEqual(["b", "c", "d"]);
});

it("leaves single numbers out unless they are wanted", () => {
  const counted = [...all, { ...tensor("step", "changed", 9), shape: [] }];
  expect(arrange(counted, wanted)).toHaveLength(3);
  expect(arrange(counted, { ...wanted, withScalars: true })[0]?.path).toBe("step");
});

it("filters by path and sorts by it", () => {
  expect(paths({ withSame: true, column: "path", descending: false })).toEqual(["a", "b", "c", "d"]);
  expect(paths({ filter: "C" })).toEqual(["c"]);
});

it("counts what became of how many", () => {
  expect(counts(all)).toEqual([["changed", 2], ["added", 1], ["same", 1]]);
});

it("draws bars by orders of magnitude", () => {
  expect(barLength(1, 1)).toBe(1);
  expect(barLength(1e-3, 1)).toBeCloseTo(0.5);
  expect(barLength(1e-9, 1)).toBe(0);
  expect(barLength(null, 1)).toBe(0);
});

it("takes the difference of numbers only", () => {
  expect(delta(1, 3)).toBe(2);
  expect(delta(null, 3)).toBeNull();
});
