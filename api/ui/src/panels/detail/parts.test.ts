import { expect, test } from "vitest";
import { measuredByRank, placesOf, rowsOf, wholeMetrics } from "./parts";

const held = (rank: number, tier = "memory", node = "a", status = "ok") => ({ rank, tier, node, status, bytes: 10, run: null });
const part = (rank: number) => ({ rank, digest: "d", tier: "memory", node: "a", bytes_total: 100 + rank, bytes_new: 1, run: `run${rank}`, told_at: "2026-01-01T00:00:00Z" });

test("every rank has a row, also one of whose part nobody knows", () => {
  const rows = rowsOf({ world_size: 3, parts: [part(0), part(1)], replicas: [held(0), held(0, "local"), held(1)] });
  expect(rows.map((row) => [row.rank, row.bytes, row.run, row.replicas.length])).toEqual([[0, 100, "run0", 2], [1, 101, "run1", 1], [2, null, null, 0]]);
});

test("a place is named once, with its ranks and the sum of what they added", () => {
  expect(placesOf([held(0), held(1), held(2, "memory", "b"), held(1, "memory", "a", "gone")])).toEqual([
    { tier: "memory", node: "a", status: "ok", ranks: [0, 1], bytes: 20 },
    { tier: "memory", node: "b", status: "ok", ranks: [2], bytes: 10 },
    { tier: "memory", node: "a", status: "gone", ranks: [1], bytes: 10 },
  ]);
});

test("what ranks measured is told by rank, with its bounds and mean; what is not a number counts in none of them", () => {
  const metrics = { loss: 1, "loss@0": 1, "loss@1": 4, "loss@2": null, lr: 0.1 };
  expect(measuredByRank(metrics)).toEqual([{ name: "loss", values: new Map([[0, 1], [1, 4], [2, null]]), least: 1, greatest: 4, mean: 2.5 }]);
  expect(wholeMetrics(metrics)).toEqual({ loss: 1, lr: 0.1 });
});
