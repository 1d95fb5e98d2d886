import { describe, expect, it } from "vitest";
import { heatMarks, heatOf, heatPlace, splitPath } from "./heat";
import type { Change, TensorChange } from "./types";

const tensor = (path: string, relative: number | null, change: Change = "changed", shape = [4, 2]): TensorChange => ({
  path, change, shape, dtype: "float32", old_shape: null, old_dtype: null, old_norm: null, norm: null, distance: null, cosine: null, largest: null, at: null,
  fraction: null, relative,
});
const all = [
  tensor("model/body.0.weight", 0.1),
  tensor("model/body.0.bias", 0.4, "changed", [4]),
  tensor("model/head.weight", null, "same"),
  tensor("optimizer/state/body.0.weight/step", 1, "changed", []),
  tensor("optimizer/state/body.0.weight/exp_avg_sq", 0.02),
  tensor("optimizer/state/body.0.weight/exp_avg", 2),
  tensor("optimizer/state/body.0.bias/exp_avg", null, "added", [4]),
];

describe("a heat map", () => {
  it("has a row for each parameter and a column for weights and each moment, without single numbers", () => {
    const heat = heatOf(all, false);
    expect(heat.kinds).toEqual(["weights", "exp_avg", "exp_avg_sq"]);
    expect(heat.rows.map((row) => [row.name, ...row.cells.map((cell) => cell && cell.relative)])).toEqual([
      ["body.0.weight", 0.1, 2, 0.02], ["body.0.bias", 0.4, null, null], ["head.weight", 0, null, null],
    ]);
    expect(heat.rows[1]?.cells[1]?.change).toBe("added");
    expect(heat.rows[1]?.cells[2]).toBeNull();
    expect(heat.ends).toEqual([0.02, 2]);
  });

  it("by layers shows the largest change of their tensors, and what cannot be measured before all", () => {
    const heat = heatOf(all, true);
    expect(heat.rows.map((row) => row.name)).toEqual(["body.0", "head"]);
    expect(heat.rows[0]?.cells[0]).toEqual({ path: "model/body.0.bias", count: 2, change: "changed", relative: 0.4 });
    expect(heat.rows[0]?.cells[1]?.change).toBe("added");
  });

  it("names columns by objects where several have weights or moments", () => {
    const heat = heatOf([tensor("model/a.weight", 1), tensor("ema/a.weight", 1), tensor("g/state/a.weight/exp_avg", 1), tensor("d/state/a.weight/exp_avg", 1)], false);
    expect(heat.kinds).toEqual(["d exp_avg", "g exp_avg", "ema", "model"]);
  });

  it("has no scale where nothing was measured or read", () => {
    expect(heatOf([tensor("model/a.weight", null, "same")], false).ends).toBeNull();
    expect(heatOf([tensor("model/a.weight", null, "unread")], false).rows).toEqual([]);
  });

  it("takes paths apart", () => {
    expect(splitPath("tree/w")).toEqual({ owner: "tree", name: "w", kind: "" });
    expect(splitPath("objects/opt/state/a.b/exp_avg")).toEqual({ owner: "objects/opt", name: "a.b", kind: "exp_avg" });
    expect(splitPath("alone")).toEqual({ owner: "alone", name: "alone", kind: "" });
  });

  it("goes by orders of magnitude, and says which", () => {
    expect([0.001, 0.01, 0.1].map((at) => heatPlace(at, [0.001, 0.1]))).toEqual([0, expect.closeTo(0.5), 1]);
    expect([heatPlace(0.5, [0.5, 0.5]), heatPlace(1e-9, [0.001, 0.1])]).toEqual([1, 0]);
    expect(heatMarks([0.0005, 2])).toEqual([0.0005, 0.001, expect.closeTo(0.01), expect.closeTo(0.1), 1, 2]);
    expect(heatMarks([0.3, 0.3])).toEqual([0.3]);
  });
});
