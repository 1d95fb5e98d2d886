import { describe, expect, it } from "vitest";
import type { SeriesLine } from "../../lib/types";
import { align, dashes, ends, homeless, nearestPlace, placesOf, smooth, titleOf, valueAt, withLost } from "./points";

const line = (head: string, steps: number[], values: (number | null)[], xs: (number | null)[] = []): SeriesLine => ({
  head, state: "", key: "loss", steps, values, uids: steps.map((step) => `${head}${step}`), total: steps.length, xs, began: null, group: null,
});

describe("align", () => {
  it("puts lines of different steps over one axis, and tells no point from one that is not a number", () => {
    const aligned = align([line("a", [1, 3], [5, null]), line("b", [2, 3], [6, 7])]);
    expect(aligned.xs).toEqual([1, 2, 3]);
    expect(aligned.values).toEqual([[5, undefined, null], [undefined, 6, 7]]);
    expect(aligned.uids[1]).toEqual([undefined, "b2", "b3"]);
  });
});

describe("lost steps", () => {
  it("follow the line of their branch, and are called lost", () => {
    const [main, other] = [line("main", [1, 2], [5, 4]), line("other", [1], [3])];
    const lost = [line("main", [2, 3], [4, 3])];
    const all = withLost([main, other], lost);
    expect(all).toEqual([main, lost[0], other]);
    expect(all.map((each) => titleOf(each, lost))).toEqual(["main", "main, lost", "other"]);
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

describe("places", () => {
  it("counts the time that passed from where a branch has states of its own", () => {
    const late = line("late", [5, 6], [1, 2], [1000, 1060]);
    expect(placesOf(late, "elapsed")).toEqual([0, 60]);
    expect(placesOf({ ...late, began: 1050 }, "elapsed")).toEqual([null, 10]);
    expect(placesOf(late, "time")).toEqual([1000, 1060]);
    expect(placesOf(late, "step")).toEqual([5, 6]);
  });

  it("leaves out points that stand nowhere, and counts them", () => {
    const some = line("a", [1, 2, 3], [7, 8, 9], [0.5, null, 1]);
    expect(align([some], "epoch")).toEqual({ xs: [0.5, 1], values: [[7, 9]], uids: [["a1", "a3"]] });
    expect([homeless([some, some], "epoch"), homeless([some], "step")]).toEqual([2, 0]);
  });

  it("takes the last of the points of one epoch", () => {
    expect(align([line("a", [1, 2, 3], [7, 8, 9], [1, 1, 2])], "epoch").values).toEqual([[8, 9]]);
  });
});

it("tells lines of one colour apart by dashes", () => {
  const [first, other, second] = dashes([3, 5, 3]);
  expect([first, other]).toEqual([[], []]);
  expect(second).not.toEqual([]);
});
