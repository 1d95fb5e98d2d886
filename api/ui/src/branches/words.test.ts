import { expect, it } from "vitest";
import { formatTook, lifeText, nextBy, pathOf, settingText } from "./words";

it("says how long something took in the unit that fits", () => {
  expect([0.25, 42, 204, 18_000, 200_000].map(formatTook)).toEqual(["0.3 s", "42 s", "3.4 min", "5.0 h", "2.3 d"]);
});

it("says what a branch changed, from what to what", () => {
  expect(settingText({ key: "lr", value: 0.03, parent: 0.1 })).toBe("lr 0.1000 → 0.03000");
  expect([settingText({ key: "wd", value: 0.5, parent: null }), settingText({ key: "wd", value: null, parent: true })]).toEqual(["wd 0.5000", "wd true → gone"]);
});

it("draws a curve from corner to corner, over what is not a number", () => {
  expect(pathOf([0, 5, 10], [1, null, 0], 12, 8)).toBe("M1.0 2.0L11.0 6.0");
  expect(pathOf([0, 10], [2, 2], 12, 8)).toBe("M1.0 4.0L11.0 4.0");
  expect(pathOf([3], [1], 12, 8)).toBeNull();
});

it("turns an order, then leaves it", () => {
  expect([nextBy("", "best"), nextBy("best", "best"), nextBy("-best", "best"), nextBy("best", "name")]).toEqual(["best", "-best", "", "name"]);
});

it("says how a training ended, or that it runs", () => {
  const ended = (how: "ended" | "failed" | "killed", error: string | null = null, step: number | null = null) => lifeText({ life: "ended", ending: { how, error, step } });
  expect([ended("ended"), ended("killed")]).toEqual(["its training has ended", "its process was killed: it ended without closing"]);
  expect(ended("failed", "ValueError: no more data", 7)).toBe("its training failed at step 7: ValueError: no more data");
  expect([lifeText({ life: "running", ending: null }), lifeText({ life: "ended", ending: null })]).toEqual(["its process runs", "its process has ended"]);
});
