import { expect, it } from "vitest";
import { byRelevance, chiefMetric, guessAim } from "./relevance";

it("puts the loss first, then what was validated, then other losses, then the rest", () => {
  const keys = ["acc", "lr", "test/acc", "val/acc", "train_loss", "val_loss", "loss", "grad/norm"];
  expect(byRelevance(keys)).toEqual(["loss", "val_loss", "val/acc", "test/acc", "train_loss", "acc", "grad/norm", "lr"]);
  expect(byRelevance(keys, ["lr"])[0]).toBe("lr");
});

it("judges by what was validated where there is something", () => {
  expect([chiefMetric(["loss", "val_loss"]), chiefMetric(["lr", "loss"]), chiefMetric([])]).toEqual(["val_loss", "loss", null]);
});

it("takes accuracies for better when they are higher", () => {
  expect([guessAim("val/acc"), guessAim("loss")]).toEqual(["max", "min"]);
});
