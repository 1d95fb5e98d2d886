import { describe, expect, it } from "vitest";
import type { SeriesLine, Value } from "../../lib/types";
import { eachOf, groupsOf, jobOf, meanOf, spreadOver } from "./groups";

const line = (head: string, steps: number[], values: (number | null)[], group: Value = null): SeriesLine => ({
  head, state: "", key: "loss", steps, values, uids: steps.map((step) => `${head}${step}`), total: steps.length, xs: [], began: null, group,
});

describe("groups", () => {
  it("stand in the order of their values: numbers, texts, none", () => {
    const lines = ["b", null, 10, 9, "a", 9].map((group, number) => line(`${number}`, [1], [1], group as Value));
    const found = groupsOf(lines, "config.lr");
    expect(found.map((one) => one.name)).toEqual(["lr 9", "lr 10", "lr a", "lr b", "no lr"]);
    expect(found[0]!.lines.map((one) => one.head)).toEqual(["3", "5"]);
  });
});

describe("the mean of several curves", () => {
  it("has a band from the least to the greatest, or of one standard deviation", () => {
    const lines = [line("a", [1, 2], [1, 2]), line("b", [1, 2], [3, 6])];
    expect(meanOf(lines, "step", "range")).toEqual({ xs: [1, 2], mean: [2, 4], low: [1, 2], high: [3, 6], counts: [2, 2] });
    const sigma = meanOf(lines, "step", "sigma");
    expect(sigma.high[0]! - 2).toBeCloseTo(Math.SQRT2);
    expect(2 - sigma.low[0]!).toBeCloseTo(Math.SQRT2);
  });

  it("goes straight between the points of a curve, and not on behind its end", () => {
    const found = meanOf([line("a", [0, 10], [0, 10]), line("b", [5, 20], [7, 7])], "step", "range");
    expect(found.xs).toEqual([0, 5, 10, 20]);
    expect(found.mean).toEqual([0, 6, 8.5, 7]);
    expect(found.counts).toEqual([1, 2, 2, 1]);
  });

  it("does not go over a gap", () => {
    const found = meanOf([line("a", [0, 1, 2, 3], [0, null, 4, 4]), line("b", [0.5, 1, 1.5, 2], [1, 1, 1, 1])], "step", "range");
    expect(found.xs).toEqual([0, 0.5, 1, 1.5, 2, 3]);
    expect(found.counts).toEqual([1, 1, 1, 1, 2, 1]);
  });

  it("has no band where there is one curve", () => {
    expect(meanOf([line("a", [1], [5])], "step", "sigma")).toEqual({ xs: [1], mean: [5], low: [5], high: [5], counts: [1] });
  });

  it("is that of the smoothed curves where they are smoothed", () => {
    const found = meanOf([line("a", [1, 2], [0, 1]), line("b", [1, 2], [0, 1])], "step", "range", 0.5);
    expect(found.mean[1]).toBeCloseTo(0.5 / 0.75);
  });
});

it("has no value where another curve has a place", () => {
  expect(spreadOver([1, 2, 3], [1, 3], [5, 6])).toEqual([5, undefined, 6]);
});

it("takes the ranks of a branch together, and tells them apart where each is drawn", () => {
  const ranks = ["loss@0", "loss@1"].map((key) => ({ ...line("ddp", [1], [1]), key }));
  expect(jobOf(line("ddp", [1], [9]), ranks)).toEqual({ name: "ddp", lines: ranks });
  const alone = line("main", [1], [9]);
  expect(jobOf(alone, ranks).lines).toEqual([alone]);
  expect(eachOf(ranks).map((one) => one.head)).toEqual(["ddp, rank 0", "ddp, rank 1"]);
});
