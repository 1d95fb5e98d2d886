import { expect, it } from "vitest";
import { along, height, outline } from "./spread";

it("draws a step for each bin, down to nothing at both ends", () => {
  expect(outline([0, 1, 2], [3, 1], (at) => at * 10, (count) => 5 - count)).toBe("M0.0 5.0L0.0 2.0L10.0 2.0L10.0 4.0L20.0 4.0L20.0 5.0Z");
  expect(outline([0], [], Number, Number)).toBe("");
});

it("places values by themselves or by their logarithms", () => {
  expect([0, 5, 10].map(along([0, 3, 10], false))).toEqual([0, 0.5, 1]);
  expect([1e-4, 1e-2, 1].map(along([1e-4, 1], true))).toEqual([0, expect.closeTo(0.5), 1]);
  expect(along([2, 2], false)(2)).toBe(0.5);
});

it("is as high as its count, or shows rare ones too", () => {
  expect([0, 50, 100].map(height(100, false))).toEqual([0, 0.5, 1]);
  expect(height(1e6, true)(1)).toBeGreaterThan(0.04);
  expect(height(0, false)(0)).toBe(0);
});
