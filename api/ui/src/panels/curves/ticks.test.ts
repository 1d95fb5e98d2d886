import { expect, it } from "vitest";
import { sayElapsed, sayPlace } from "./ticks";

it("says how much time passed in the units of people", () => {
  expect([0, 0.5, 45, 90, 3600, 5400, 90_000].map(sayElapsed)).toEqual(["0", "0.5000 s", "45 s", "1 min 30 s", "1 h", "1 h 30 min", "1 d 1 h"]);
});

it("says a place by what the axis is", () => {
  expect([sayPlace(40, "step"), sayPlace(2.5, "epoch"), sayPlace(120, "elapsed")]).toEqual(["step 40", "epoch 2.500", "after 2 min"]);
});
