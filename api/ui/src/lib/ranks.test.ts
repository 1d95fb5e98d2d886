import { expect, test } from "vitest";
import { byRank, evenly, rankOf, ranksText, withoutRanks } from "./ranks";

test("ranks are written as spans", () => {
  expect([[], [3], [0, 1], [0, 1, 2, 5, 7, 8]].map(ranksText)).toEqual(["", "3", "0-1", "0-2, 5, 7-8"]);
});

test("what ranks measured belongs to the metric of that name, by number", () => {
  const found = byRank(["loss", "loss@10", "loss@2", "loss@0", "lr", "a@b", "a@b@0", "a@b@1"]);
  expect([...found]).toEqual([["loss", ["loss@0", "loss@2", "loss@10"]], ["a@b", ["a@b@0", "a@b@1"]]]);
  expect(found.get("loss")!.map(rankOf)).toEqual(["0", "2", "10"]);
});

test("the accuracy of the first five guesses is no rank's", () => {
  expect([...byRank(["acc", "acc@1", "acc@5", "recall@0", "recall@1", "one", "one@0", "two", "two@0x", "two@01"])]).toEqual([]);
});

test("keys of single ranks are left out, and of many ranks some stand for all", () => {
  expect(withoutRanks(["loss", "loss@0", "loss@1", "acc@1"])).toEqual(["loss", "acc@1"]);
  expect(evenly([0, 1, 2, 3, 4, 5, 6, 7, 8], 3)).toEqual([0, 4, 8]);
  expect(evenly([0, 1], 3)).toEqual([0, 1]);
});
