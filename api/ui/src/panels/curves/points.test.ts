import { describe, expect, it } from "vitest";
import type { SeriesLine } from "../../lib/types";
import { chosenHeads, chosenKeys, toggled } from "./choice";
import { align, ends, nearestPlace, smooth, valueAt } from "./points";

const line = (head: string, steps: number[], values: (number | null)[]): SeriesLine => ({
  head, state: "", key: "loss", steps, values, uids: steps.map((step) => `${head}${step}`), total: steps.length,
});

describe("align", () => {
  it("puts lines of different steps over one axis, and tells no point from one that is not a number", () => {
    const aligned = align([line("a", [1, 3], [5, null]), line("b", [2, 3], [6, 7])]);
    expect(aligned.steps).toEqual([1, 2, 3]);
    expect(aligned.values).toEqual([[5, undefined, null], [undefined, 6, 7]]);
    expect(aligned.uids[1]).toEqual([undefined, "b2", "b3"]);
  });
});

describe("smooth", () => {
  it("begins at the first value and steps over gaps", () => {
    expect(smooth([4, undefined, null, 4], 0.9)).toEqual([4, undefined, null, expect.closeTo(4, 12)]);
  });
  it("follows slowly", () => {
    const [, second] = smooth([0, 1], 0.5);
    expect(second).toBeCloseTo(0.5 / 0.75);
  });
});

describe("ends", () => {
  it("finds the last number and the best one, whichever is better", () => {
    const shown = line("a", [1, 2, 3, 4], [2, 1, 3, null]);
    expect(ends(shown, "min")).toEqual({ last: { step: 3, value: 3, uid: "a3" }, best: { step: 2, value: 1, uid: "a2" } });
    expect(ends(shown, "max")?.best.step).toBe(3);
    expect(ends(line("a", [1], [null]), "min")).toBeNull();
  });
});

it("reads a value at a place without a point from the last one before it", () => {
  expect(valueAt([1, undefined, 2], 1)).toBe(1);
  expect(valueAt([undefined], 0)).toBeNull();
});

it("finds the nearest point on either side", () => {
  expect(nearestPlace([1, undefined, undefined, 4], 2)).toBe(3);
  expect(nearestPlace([1, null, undefined, undefined], 2)).toBe(0);
  expect(nearestPlace([undefined], 0)).toBe(-1);
});

it("shows main and a loss first unless something was chosen", () => {
  expect(chosenHeads([], ["a", "main"])).toEqual(["main", "a"]);
  expect(chosenHeads(["a"], ["a", "main"])).toEqual(["a"]);
  expect(chosenKeys([], ["acc", "lr", "val_loss", "loss"])).toEqual(["loss", "val_loss"]);
  expect(toggled(["a"], "a")).toEqual([]);
});
