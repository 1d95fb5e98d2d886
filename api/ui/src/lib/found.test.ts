import { beforeEach, expect, it, vi } from "vitest";

const asked = vi.hoisted(() => ({ total: 0, pages: 0, full: 0, held: Promise.resolve() as Promise<unknown> }));

/** A server that finds `total` states; its cursor is the number of states before. */
vi.mock("./api", () => ({
  getStates: ({ after, limit, fields }: { after: string | null; limit: number; fields?: string }) => {
    const first = Number(after ?? 0);
    const count = Math.min(limit, asked.total - first);
    asked.pages += 1;
    asked.full += fields ? 0 : count;
    const items = Array.from({ length: count }, (_, offset) => ({ uid: `state-${first + offset}` }));
    return asked.held.then(() => ({ items, next: first + count < asked.total ? String(first + count) : null }));
  },
}));

const { found } = await import("./found.svelte");

beforeEach(async () => {
  Object.assign(asked, { total: 250_300, pages: 0, full: 0, held: Promise.resolve() });
  await found.open("step > 3");
});

it("reaches the last of very many states, of which it keeps only some", async () => {
  await found.toEnd();
  expect([found.count, found.hasMore, found.isEnding]).toEqual([250_300, false, false]);
  await found.show(250_270, 250_300);
  expect(found.stateAt(250_299)?.uid).toBe("state-250299");
  expect(found.indexOf("state-250299")).toBe(250_299);
  expect(asked.full).toBeLessThan(3_000);
});

it("brings back what left", async () => {
  await found.toEnd();
  for (let first = 0; first < 60_000; first += 1_000) await found.show(first, first + 1_000);
  expect(found.stateAt(5)).toBeUndefined();
  await found.show(0, 10);
  expect(found.stateAt(5)?.uid).toBe("state-5");
});

it("reads on as one scrolls", async () => {
  await found.show(150, 180);
  await vi.waitFor(() => expect(found.count).toBe(400));
  expect(found.stateAt(399)?.uid).toBe("state-399");
});

it("counts each state once when the end is wanted while it reads on", async () => {
  void found.show(150, 180);
  await found.toEnd();
  expect(found.count).toBe(250_300);
});

it("has a state once it said so, whoever asked for its page first", async () => {
  await found.toEnd();
  asked.held = new Promise((resolve) => setTimeout(resolve, 5));
  void found.show(5_000, 5_010);
  await found.show(5_000, 5_010);
  expect(found.stateAt(5_005)?.uid).toBe("state-5005");
});

it("stops where it is told to", async () => {
  const ending = found.toEnd();
  found.stop();
  await ending;
  expect(found.count).toBeLessThan(3_000);
  expect(found.hasMore).toBe(true);
});

it("forgets what was found before when it finds anew", async () => {
  await found.toEnd();
  asked.total = 3;
  await found.open("step > 4");
  expect([found.count, found.stateAt(2)?.uid, found.stateAt(3)]).toEqual([3, "state-2", undefined]);
});
