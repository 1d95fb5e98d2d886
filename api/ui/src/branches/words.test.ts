import { expect, it } from "vitest";
import { formatTook, isDiverged, lifeText, nextBy, pathOf, rangeOf, settingsOf, settingText } from "./words";

it("says how long something took in the unit that fits", () => {
  expect([0.25, 42, 204, 18_000, 200_000].map(formatTook)).toEqual(["0.3 s", "42 s", "3.4 min", "5.0 h", "2.3 d"]);
});

it("says what a branch changed, from what to what", () => {
  expect(settingText({ key: "lr", value: 0.03, parent: 0.1 })).toBe("lr 0.1 → 0.03");
  expect([settingText({ key: "wd", value: 0.5, parent: null }), settingText({ key: "wd", value: null, parent: true })]).toEqual(["wd 0.5", "wd true → gone"]);
});

it("shows in what the listed branches differ, what a branch changed first", () => {
  const config = [{ key: "lr", value: 0.03, parent: 0.1 }, { key: "seed", value: 2, parent: 1 }];
  const fork = { state: "", step: 3, branch: "main", is_gone: false };
  const shown = (settings: Record<string, number | string>, from: typeof fork | null = fork) => settingsOf({ config, settings, fork: from }).map(settingText);
  expect(shown({ lr: 0.03, optimizer: "sgd" })).toEqual(["lr 0.1 → 0.03", "optimizer sgd"]);
  expect(shown({})).toEqual(["lr 0.1 → 0.03", "seed 1 → 2"]);
  expect([shown({}, null), shown({ lr: 0.03 }, null)]).toEqual([[], ["lr 0.03"]]);
});

it("draws a curve from corner to corner, and marks what is not a number", () => {
  expect(pathOf({ steps: [0, 5, 10], values: [1, null, 0] }, 12, 8)).toEqual({ path: "M1.0 2.0L11.0 6.0", gaps: "M6.0 1V7" });
  expect(pathOf({ steps: [0, 10], values: [2, 2] }, 12, 8).path).toBe("M1.0 4.0L11.0 4.0");
  expect(pathOf({ steps: [3], values: [1] }, 12, 8).path).toBe("");
});

it("draws several curves over one range, and what is outside at its edge", () => {
  const lines = [{ steps: [0, 10], values: [4, 2] }, { steps: [0, 10], values: [1, 0] }];
  expect([rangeOf(lines), rangeOf([])]).toEqual([[0, 4], null]);
  expect(pathOf(lines[1]!, 12, 8, [0, 4]).path).toBe("M1.0 5.0L11.0 6.0");
  expect(pathOf({ steps: [0, 10], values: [1, 900] }, 12, 8, [0, 4]).path).toBe("M1.0 5.0L11.0 2.0");
});

it("calls a training diverged if it ends with no number, or far above all that it had", () => {
  const point = (value: number | null) => ({ state: "", step: 9, value, status: "durable" as const });
  const ends = (last: number | null, best: number, values: (number | null)[], direction: "min" | "max" = "min") => isDiverged({ last: point(last), best: point(best), line: { steps: values.map((_, step) => step), values } }, direction);
  expect([ends(null, 0.3, [2, 0.3, null]), ends(1e6, 0.3, [2, 0.3, 1e6])]).toEqual([true, true]);
  expect([ends(0.4, 0.3, [2, 0.3, 0.4]), ends(1e6, 1e6, [2, 0.3, 1e6], "max"), isDiverged({ last: null, best: null, line: { steps: [], values: [] } }, "min")]).toEqual([false, false, false]);
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
