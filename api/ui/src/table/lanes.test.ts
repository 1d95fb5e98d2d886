import { describe, expect, it } from "vitest";
import type { GraphRow, State } from "../lib/types";
import { branchAt, laneAt, linesOf, NO_BRANCH, spread, xOf } from "./lanes";

const row = (fields: Partial<GraphRow>): GraphRow => ({ state: { uid: "" } as State, lane: 0, above: [], below: [], joins: [], parents: [], branch: 0, above_branches: [], below_branches: [], refs: [], count: 1, restorable: null, oldest: null, ...fields });

describe("lines of a row", () => {
  it("pass where they only pass", () => {
    expect(linesOf(row({ lane: 0, above: [0, 1], below: [0, 1], parents: [0], branch: 4, above_branches: [4, 7], below_branches: [4, 7] }))).toEqual([
      { from: 0, to: 0, begins: 0, ends: 0.5, branch: 4 },
      { from: 1, to: 1, begins: 0, ends: 1, branch: 7 },
      { from: 0, to: 0, begins: 0.5, ends: 1, branch: 4 },
    ]);
  });

  it("lead from children in other columns, in the children's colour", () => {
    expect(linesOf(row({ lane: 0, above: [0, 2], below: [0], joins: [2], parents: [0], above_branches: [0, 5] }))[1]).toEqual({ from: 2, to: 0, begins: 0, ends: 0.5, branch: 5 });
  });

  it("lead to a merge's further parent in that parent's colour, and to a first parent in their own", () => {
    const lines = linesOf(row({ lane: 1, above: [0, 1], below: [0, 2], parents: [0, 2], branch: 3, above_branches: [0, 3], below_branches: [0, 6] }));
    expect(lines.slice(2)).toEqual([
      { from: 1, to: 0, begins: 0.5, ends: 1, branch: 3 },
      { from: 1, to: 2, begins: 0.5, ends: 1, branch: 6 },
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
  const one = row({ lane: 1, above: [0, 1], below: [0, 1, 2], branch: 3, above_branches: [0, 3], below_branches: [0, 3, 9] });

  it("is what the server says of the row, of the lines above it, and of those that begin at it", () => {
    expect([branchAt(one, 1), branchAt(one, 0), branchAt(one, 2), branchAt(one, 5)]).toEqual([3, 0, 9, NO_BRANCH]);
  });
});
