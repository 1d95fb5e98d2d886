import { readFileSync } from "node:fs";
import { expect, it } from "vitest";
import { byRelevance, chiefMetric, guessAim } from "./relevance";

/** The same rules in Python are tested with this too (tests/lineage/test_relevance.py). */
const table = JSON.parse(readFileSync(new URL("./relevance.test.json", import.meta.url), "utf8")) as { ordered: string[][]; better: Record<string, string> };

it("orders metrics as every other part does, the loss first", () => {
  for (const keys of table.ordered) expect(byRelevance([...keys].reverse())).toEqual(keys);
  expect(byRelevance(table.ordered[0]!, ["lr"])[0]).toBe("lr");
});

it("judges by the metric that matters most, as branches are judged", () => {
  expect([chiefMetric(["val_loss", "loss"]), chiefMetric(["lr", "val_loss"]), chiefMetric([])]).toEqual(["loss", "val_loss", null]);
});

it("takes for better what every other part takes for better", () => {
  for (const [key, better] of Object.entries(table.better)) expect([key, guessAim(key)]).toEqual([key, better]);
});
