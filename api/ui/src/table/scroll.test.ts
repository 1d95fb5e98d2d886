import { describe, expect, it } from "vitest";
import { LIMIT, ROW, Scale, seen } from "./scroll";

const VIEWPORT = 700;

describe("scale", () => {
  it("is exact while the browser can make the element high enough", () => {
    const scale = new Scale(10_000, VIEWPORT);
    scale.scrolled(5_000);
    expect([scale.isExact, scale.offset, scale.topOf(3)]).toEqual([true, 5_000, 3 * ROW]);
  });

  it("has no element higher than a browser makes one", () => {
    expect(new Scale(1_000_000, VIEWPORT).height).toBe(LIMIT);
  });

  it("moves rows by as much as a wheel turns", () => {
    const scale = new Scale(1_000_000, VIEWPORT);
    scale.scrolled(7_000_000);
    const before = scale.offset;
    scale.scrolled(7_000_100);
    expect(scale.offset - before).toBe(100);
  });

  it("reaches both ends by the scroll bar", () => {
    const scale = new Scale(1_000_000, VIEWPORT);
    scale.scrolled(LIMIT - VIEWPORT);
    expect(scale.offset).toBeCloseTo(1_000_000 * ROW - VIEWPORT, 0);
    scale.scrolled(0);
    expect(scale.offset).toBe(0);
  });

  it("puts the element where it belongs without moving a row on the screen", () => {
    const scale = new Scale(1_000_000, VIEWPORT);
    for (let physical = 0; physical < 100_000; physical += 500) scale.scrolled(physical);
    const [offset, screen] = [scale.offset, scale.topOf(4_000) - 99_500];
    const physical = scale.settle();
    expect(scale.offset).toBe(offset);
    expect(scale.topOf(4_000) - physical).toBe(screen);
    expect(physical).toBeLessThan(60_000);
  });

  it("aims at a row", () => {
    const scale = new Scale(1_000_000, VIEWPORT);
    scale.scrolled(scale.aim(777_777 * ROW));
    expect(scale.offset).toBe(777_777 * ROW);
  });

  it("has no rows beyond the last", () => {
    expect(seen(0, VIEWPORT, 3, 10)).toEqual({ start: 0, end: 3 });
    expect(seen(101 * ROW, 10 * ROW, 1000, 5)).toEqual({ start: 95, end: 120 });
    expect(seen(104.9 * ROW, 10 * ROW, 1000, 5)).toEqual({ start: 95, end: 120 });
  });
});
