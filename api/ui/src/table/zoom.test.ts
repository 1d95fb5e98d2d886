import { expect, it, vi } from "vitest";

vi.stubGlobal("location", { pathname: "/", search: "", hash: "" });
vi.stubGlobal("history", { pushState: vi.fn(), replaceState: vi.fn() });

const { LEVELS, nextLevel, zoom } = await import("./zoom.svelte");
const { view } = await import("../lib/view.svelte");

it("goes from level to level, and stays at the ends", () => {
  expect(LEVELS.map((level) => nextLevel(level, 1))).toEqual([...LEVELS.slice(1), 2]);
  expect(LEVELS.map((level) => nextLevel(level, -1))).toEqual([0.4, ...LEVELS.slice(0, -1)]);
  expect([nextLevel(0.9, 1), nextLevel(0.9, -1)]).toEqual([1, 0.8]);
});

it("is in the address unless it is as usual", () => {
  zoom.set(0.5);
  expect(view.own["graph.zoom"]).toBe("0.5");
  zoom.set(1);
  expect(view.own["graph.zoom"]).toBeUndefined();
});
