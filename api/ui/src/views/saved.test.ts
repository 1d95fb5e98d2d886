import { describe, expect, it } from "vitest";
import { DEFAULTS, type View } from "../lib/address";
import { keepViews, renamed, savedViews, viewOf, without, withView } from "./saved";

const view: View = { ...DEFAULTS, repository: "runs", scene: "graph", query: "step > 3", group: "config.lr", theme: "dark", own: { "curves.log": "1" } };

function storeOf(held: Record<string, string> = {}) {
  return { getItem: (key: string) => held[key] ?? null, setItem: (key: string, value: string) => void (held[key] = value) };
}

describe("saved views", () => {
  it("show again what was shown, in the reader's theme", () => {
    const store = storeOf();
    expect(keepViews("runs", withView([], "  my \n view ", view), store)).toBe(true);
    const [saved] = savedViews("runs", store);
    expect(saved!.name).toBe("my view");
    expect(viewOf(saved!, { ...DEFAULTS, repository: "runs", theme: "light" })).toEqual({ ...view, theme: "light" });
    expect(savedViews("others", store)).toEqual([]);
  });

  it("are replaced, renamed and deleted by name, and no name is taken twice", () => {
    const two = withView(withView([], "b", DEFAULTS), "a", view);
    expect(two.map((one) => one.name)).toEqual(["a", "b"]);
    expect(withView(two, "a", { ...view, query: "" })).toHaveLength(2);
    expect(renamed(two, "a", "c").map((one) => one.name)).toEqual(["c", "b"]);
    expect(renamed(two, "a", "b")).toEqual(two);
    expect(renamed(two, "a", " ")).toEqual(two);
    expect(without(two, "a").map((one) => one.name)).toEqual(["b"]);
  });

  it("are none where the browser holds something else, or keeps nothing", () => {
    expect(savedViews("runs", storeOf({ "datastates.views.runs": "{" }))).toEqual([]);
    expect(savedViews("runs", storeOf({ "datastates.views.runs": '[1, {"name": 2}, null, {"name": "a", "address": "?q=x"}]' }))).toHaveLength(1);
    expect(keepViews("runs", [], { setItem: () => { throw new Error("full"); } })).toBe(false);
  });
});
