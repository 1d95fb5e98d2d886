import { expect, test } from "vitest";
import type { StudyVariant } from "./types";
import { countStages, epochsText, inOrder, percent, splitError } from "./words";

const variant = (name: string, more: Partial<StudyVariant> = {}) => ({ name, stage: "done", rank: null, took_s: null, bytes: 0, epoch: null, epochs: null, samples: null, samples_all: null, ...more }) as StudyVariant;

test("variants without a rank come last, and equal ones stay in the order of the plan", () => {
  const all = [variant("a"), variant("b", { rank: 2 }), variant("c"), variant("d", { rank: 1 })];
  expect(inOrder(all, "rank").map((one) => one.name)).toEqual(["d", "b", "a", "c"]);
  expect(inOrder(all, "tree")).toBe(all);
});

test("the dearest come first", () => {
  const all = [variant("a", { took_s: 1, bytes: 3 }), variant("b", { took_s: 4, bytes: 2 }), variant("c")];
  expect(inOrder(all, "took").map((one) => one.name)).toEqual(["b", "a", "c"]);
  expect(inOrder(all, "bytes").map((one) => one.name)).toEqual(["a", "b", "c"]);
});

test("stages are counted in the order in which they matter", () => {
  expect(countStages([variant("a"), variant("b", { stage: "failed" }), variant("c")])).toBe("2 done, 1 failed");
});

test("epochs say what part of the data they were over", () => {
  expect(epochsText(variant("a", { epoch: 1, epochs: 3 }))).toBe("1 / 3");
  expect(epochsText(variant("a", { epochs: 3, samples: 8, samples_all: 10 }))).toBe("0 / 3 · 80 %");
  expect(epochsText(variant("a"))).toBe("–");
});

test("a small share has a digit more", () => {
  expect([percent(0.5), percent(0.031), percent(0)]).toEqual(["50 %", "3.1 %", "0 %"]);
});

test("an error is its first line and the rest", () => {
  expect(splitError("ValueError: no\n\nTraceback\n  x")).toEqual(["ValueError: no", "Traceback\n  x"]);
  expect(splitError("killed")).toEqual(["killed", ""]);
});
