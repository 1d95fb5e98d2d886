import { describe, expect, it } from "vitest";
import { byName, chosenKeys, headsOf, matching, MOST, orderOf, pickOf, toggled } from "./choice";

const many = Array.from({ length: 40 }, (_, number) => `seed-${number}`);

describe("which curves", () => {
  it("are what the address says: a rule before names, names before the heads of the history", () => {
    expect(pickOf("top5", ["a"], ["b"])).toEqual({ rule: "top", count: 5 });
    expect(pickOf("", ["a"], ["b"])).toEqual({ rule: "names", names: ["a"] });
    expect(pickOf("", [], ["b"])).toEqual({ rule: "names", names: ["b"] });
    expect(pickOf("none", ["a"], ["b"])).toEqual({ rule: "none" });
    for (const wrong of ["top0", "top999", "best5", ""]) expect(pickOf(wrong, [], [])).toEqual({ rule: "usual" });
  });

  it("are all of a few branches, the trunk first", () => {
    expect(headsOf(pickOf("", [], []), ["b10", "b9", "main"], null)).toEqual(["main", "b9", "b10"]);
  });

  it("are those with the best values of many, once the server has said which, and the trunk", () => {
    const pick = pickOf("", [], []);
    expect(orderOf(pick, 41)).toEqual({ sort: "best", limit: 8 });
    expect(headsOf(pick, ["main", ...many], null)).toBeNull();
    expect(headsOf(pick, ["main", ...many], ["seed-7", "seed-3"])).toEqual(["main", "seed-7", "seed-3"]);
  });

  it("are exactly those at the top or at the bottom", () => {
    expect(orderOf(pickOf("top3", [], []), 3)).toEqual({ sort: "best", limit: 3 });
    expect(orderOf(pickOf("bottom3", [], []), 99)).toEqual({ sort: "-best", limit: 3 });
    expect(headsOf(pickOf("bottom2", [], []), ["main", ...many], ["seed-9", "seed-1"])).toEqual(["seed-9", "seed-1"]);
  });

  it("are none, or all, but never more than can be told apart", () => {
    expect(headsOf(pickOf("none", [], []), many, null)).toEqual([]);
    expect(headsOf(pickOf("all", [], []), many, null)).toHaveLength(40);
    expect(orderOf(pickOf("all", [], []), MOST + 1)).toEqual({ sort: "best", limit: MOST });
  });
});

it("counts names as people do, and finds them by any of their words", () => {
  expect(byName(["seed-10", "seed-9", "lr-0.1/seed-2", "lr-0.03/seed-10", "lr-0.1/seed-1"])).toEqual(["lr-0.03/seed-10", "lr-0.1/seed-1", "lr-0.1/seed-2", "seed-9", "seed-10"]);
  expect(matching(["lr-0.1/seed-1", "lr-0.1/seed-2", "lr-1/seed-1"], " SEED-1  0.1")).toEqual(["lr-0.1/seed-1"]);
  expect(matching(["a"], "")).toEqual(["a"]);
});

it("shows a loss first unless something was chosen", () => {
  expect(chosenKeys([], ["acc", "lr", "val_loss", "loss"])).toEqual(["loss", "val_loss"]);
  expect(toggled(["a"], "a")).toEqual([]);
});
