import { describe, expect, it } from "vitest";
import type { State, Stats } from "../lib/types";
import { allColumns, columnOf, defaultColumns, textOf, titleOf } from "./columns";

const metric = (key: string, count: number) => ({ key, count, least: 0, most: 1 });
const stats = { metrics: [metric("rare", 1), metric("loss", 9), metric("a.b", 5), metric("lr", 9)], attributes: ["epoch"] } as unknown as Stats;
const state = { uid: "ab".repeat(12), step: 7, micro_step: 2, metrics: { loss: 0.25, "a.b": null }, attributes: { epoch: 3 }, message: null, status: "durable" } as unknown as State;

describe("columns", () => {
  it("are what people look at first and most states have, unless chosen", () => {
    expect(defaultColumns(stats, false)).toEqual(["refs", "step", "metrics.loss", "metrics.a.b", "metrics.lr", "status", "age", "message"]);
    expect(defaultColumns(stats, true)).toEqual(["refs", "step", "metrics.loss"]);
    expect(defaultColumns(null, false)).toEqual(["refs", "step", "status", "age", "message"]);
  });

  it("are first what the filter and the order speak of", () => {
    const query = 'metrics.rare > 2 and attr.epoch = 3 order by metrics."a b" desc';
    expect(defaultColumns(stats, false, query)).toEqual(["refs", "step", "metrics.rare", "attr.epoch", "metrics.a b", "status", "age", "message"]);
    for (const rare of ["metrics.rare > 2", "rare is nan"]) expect(defaultColumns(stats, false, rare)).toEqual(["refs", "step", "metrics.rare", "metrics.loss", "metrics.lr", "status", "age", "message"]);
  });

  it("are all that the repository has", () => {
    expect(allColumns(stats)).toEqual(expect.arrayContaining(["uid", "metrics.rare", "attr.epoch"]));
  });

  it("sort by what the search grammar calls them", () => {
    expect(["age", "metrics.a b", "attr.epoch", "refs"].map((id) => columnOf(id).sortBy)).toEqual(["created", 'metrics."a b"', "attr.epoch", null]);
  });

  it("say what a state has, and nothing of what it lacks", () => {
    const said = ["step", "metrics.loss", "metrics.a.b", "metrics.none", "attr.epoch", "message", "uid"].map((id) => textOf(id, state, 0));
    expect(said).toEqual(["7+2", "0.2500", "NaN", "", "3", "", "abababab"]);
    expect(titleOf("metrics.loss", state)).toBe("0.25");
  });
});
