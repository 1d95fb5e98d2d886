import { expect, it } from "vitest";
import { bestOf } from "./best";

it("marks the best values of what has a direction, and no others", () => {
  expect(bestOf({ key: "loss", values: [0.3, 0.1, null, 0.1], differs: true, direction: "min" })).toEqual([1, 3]);
  expect(bestOf({ key: "acc", values: [0.3, 0.9], differs: true, direction: "max" })).toEqual([1]);
  expect(bestOf({ key: "acc", values: [0.9, 0.9], differs: false, direction: "max" })).toEqual([]);
  expect(bestOf({ key: "lr", values: [0.1, 0.2], differs: true, direction: null })).toEqual([]);
  expect(bestOf({ key: "loss", values: [null, 0.2], differs: true, direction: "min" })).toEqual([]);
});
