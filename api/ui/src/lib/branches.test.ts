import { beforeEach, expect, it, vi } from "vitest";

const asked = vi.hoisted(() => ({ answers: [] as ((branch: string) => void)[], givenUp: 0 }));

/** A server that answers when it is told to. */
vi.mock("./api", () => ({
  getBranches: (_: unknown, signal: AbortSignal) =>
    new Promise((resolve) => {
      signal.addEventListener("abort", () => (asked.givenUp += 1));
      asked.answers.push((name) => resolve({ items: [{ name }], next: null, matching: 1, total: 1 }));
    }),
}));

const { branchList } = await import("./branches.svelte");

beforeEach(() => {
  branchList.forget();
  Object.assign(asked, { answers: [], givenUp: 0 });
});

it("shows the answer to a question during which the lineage changed, and asks once more", async () => {
  void branchList.open();
  for (let event = 0; event < 3; event++) void branchList.refresh();
  expect([asked.answers.length, asked.givenUp]).toEqual([1, 0]);
  asked.answers[0]?.("first");
  await vi.waitFor(() => expect(asked.answers.length).toBe(2));
  expect(branchList.items.map((branch) => branch.name)).toEqual(["first"]);
  asked.answers[1]?.("second");
  await vi.waitFor(() => expect(branchList.isLoading).toBe(false));
  expect([branchList.items.map((branch) => branch.name), asked.answers.length]).toEqual([["second"], 2]);
});

it("gives up a question when another one is put", async () => {
  void branchList.open();
  void branchList.refresh();
  void branchList.open();
  expect([asked.answers.length, asked.givenUp]).toEqual([2, 1]);
  asked.answers[1]?.("other");
  await vi.waitFor(() => expect(branchList.isLoading).toBe(false));
  expect([branchList.items.map((branch) => branch.name), asked.answers.length]).toEqual([["other"], 2]);
});
