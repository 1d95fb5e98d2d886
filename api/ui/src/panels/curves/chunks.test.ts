import { expect, it } from "vitest";
import { keyChunks, mostAtOnce, nextSize, pointsOf } from "./chunks";

it("asks for more at once while answers are quick, and for fewer when they are slow", () => {
  expect([nextSize(1, 20, 16), nextSize(1, 230, 16), nextSize(4, 800, 16), nextSize(4, 2000, 16), nextSize(1, 9000, 16), nextSize(16, 1, 16)]).toEqual([4, 3, 4, 1, 1, 16]);
});

it("never asks for more than the API answers", () => {
  for (const heads of [1, 8, 40, 100]) for (const keys of [1, 5, 32]) expect(mostAtOnce(pointsOf(heads), keys) * keys * pointsOf(heads)).toBeLessThanOrEqual(200_000);
});

it("asks for the metrics of many ranks in several goes", () => {
  const keys = Array.from({ length: 70 }, (_, rank) => `loss@${rank}`);
  expect(keyChunks(keys).map((some) => some.length)).toEqual([32, 32, 6]);
  expect(keyChunks(keys).flat()).toEqual(keys);
});
