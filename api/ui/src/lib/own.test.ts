import { beforeEach, describe, expect, it, vi } from "vitest";

vi.stubGlobal("location", { pathname: "/", search: "", hash: "" });
vi.stubGlobal("history", { pushState: vi.fn(), replaceState: vi.fn() });

const { flag, inAddress, list, number, oneOf, range } = await import("./own.svelte");
const { view } = await import("./view.svelte");
const { DEFAULTS, parseAddress, writeAddress } = await import("./address");

const scale = inAddress("t.scale", oneOf("linear", "log"));
const smooth = inAddress("t.smooth", number(0, 0, 0.99));
const open = inAddress("t.open", list());
const zoom = inAddress("t.zoom", range);
const wide = inAddress("t.wide", flag);

describe("own keys of the address", () => {
  beforeEach(() => Object.assign(view, DEFAULTS));

  it("come back from the link that they are in", () => {
    scale.set("log");
    smooth.set(0.5);
    open.set(["a,b", "ü"]);
    zoom.set([-1.5, 20]);
    wide.set(true);
    const link = writeAddress(view);
    Object.assign(view, DEFAULTS);
    expect(scale.value).toBe("linear");
    Object.assign(view, parseAddress(link));
    expect([scale.value, smooth.value, open.value, zoom.value, wide.value]).toEqual(["log", 0.5, ["a,b", "ü"], [-1.5, 20], true]);
  });

  it("leave no trace where they are as they would be anyway", () => {
    scale.set("log");
    scale.set("linear");
    open.set([]);
    expect(writeAddress(view)).toBe("");
  });

  it("are at their default where the address says what cannot be", () => {
    Object.assign(view, parseAddress("?t.scale=cubic&t.smooth=7&t.zoom=5~1&t.wide=yes&t.open=%25E0%25A4"));
    expect([scale.value, smooth.value, zoom.value, wide.value, open.value]).toEqual(["linear", 0, null, false, []]);
  });

  it("have each a name of their own", () => {
    expect(() => inAddress("t.scale", flag)).toThrow("t.scale");
    expect(() => inAddress("panel", flag)).toThrow("panel");
  });
});
