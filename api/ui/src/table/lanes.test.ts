import { describe, expect, it } from "vitest";
import type { GraphRow, State } from "../lib/types";
import { branchOf } from "./branch";
import { laneAt, linesOf, spread, xOf } from "./lanes";

const row = (fields: Partial<GraphRow>): GraphRow => ({ state: { uid: "" } as State, lane: 0, above: [], below: [], joins: [], parents: [], ...fields });

describe("lines of a row", () => {
  it("pass where they only pass", () => {
    expect(linesOf(row({ lane: 0, above: [0, 1], below: [0, 1], parents: [0] }))).toEqual([
      { from: 0, to: 0, begins: 0, ends: 0.5, colour: 0 },
      { from: 1, to: 1, begins: 0, ends: 1, colour: 1 },
      { from: 0, to: 0, begins: 0.5, ends: 1, colour: 0 },
    ]);
  });

  it("lead from children in other columns, in the children's colour", () => {
    expect(linesOf(row({ lane: 0, above: [0, 2], below: [0], joins: [2], parents: [0] }))[1]).toEqual({ from: 2, to: 0, begins: 0, ends: 0.5, colour: 2 });
  });

  it("lead to a merge's further parent in that parent's colour, and to a first parent in their own", () => {
    const lines = linesOf(row({ lane: 1, above: [0, 1], below: [0, 2], parents: [0, 2] }));
    expect(lines.slice(2)).toEqual([
      { from: 1, to: 0, begins: 0.5, ends: 1, colour: 1 },
      { from: 1, to: 2, begins: 0.5, ends: 1, colour: 2 },
    ]);
  });

  it("never lack a column that the server has a line in", () => {
    const one = row({ lane: 2, above: [0, 1, 2, 3], below: [0, 2, 4], joins: [1, 3], parents: [2, 4] });
    const lines = linesOf(one);
    expect(new Set(lines.filter((line) => line.begins === 0).map((line) => line.from))).toEqual(new Set(one.above));
    expect(new Set(lines.filter((line) => line.ends === 1).map((line) => line.to))).toEqual(new Set(one.below));
  });
});

describe("columns of the graph", () => {
  it("stand closer together when there are many, and never beyond the width", () => {
    expect(spread(3, 300).gap).toBe(14);
    const many = spread(60, 300);
    expect(many.gap).toBeLessThan(6);
    expect(spread(1000, 300)).toEqual({ gap: 4, width: 300 });
  });

  it("are found by the pointer", () => {
    const at = spread(5, 300);
    expect([laneAt(xOf(3, at) + 2, at), laneAt(-20, at)]).toEqual([3, null]);
  });
});

describe("the branch of a line", () => {
  const history = [
    row({ state: { uid: "a" } as State, lane: 0, above: [], below: [0], parents: [0] }),
    row({ state: { uid: "b" } as State, lane: 1, above: [0], below: [0, 1], parents: [1] }),
    row({ state: { uid: "c" } as State, lane: 0, above: [0, 1], below: [0, 1], parents: [0] }),
    row({ state: { uid: "d" } as State, lane: 1, above: [0, 1], below: [0], parents: [0] }),
  ];
  const rows = { rowAt: (index: number) => history[index] };
  const names = { refsOf: (uid: string) => ({ a: [ref("main")], b: [ref("fork")] })[uid] ?? [] };
  const ref = (name: string) => ({ name, kind: "branch" as const, state: "", version: 1, message: null });

  it("is the name at its upper end", () => {
    expect([branchOf(3, 1, rows, names), branchOf(3, 0, rows, names), branchOf(0, 0, rows, names)]).toEqual(["fork", "main", "main"]);
  });

  it("is not known while the upper end is not loaded", () => {
    expect(branchOf(3, 0, { rowAt: (index) => (index > 1 ? history[index] : undefined) }, names)).toBe("");
  });
});
