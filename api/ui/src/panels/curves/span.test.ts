import { describe, expect, it } from "vitest";
import { seenOf } from "./span";

const calm = Array.from({ length: 200 }, (_, number) => 1 + (number % 10) / 10);

describe("what is seen of the values", () => {
  it("is all of them, with a little place around, where none is far away", () => {
    const seen = seenOf([calm], 0, 200, "auto", false)!;
    expect(seen.outside).toBe(0);
    expect([seen.low, seen.high]).toEqual([expect.closeTo(0.955), expect.closeTo(1.945)]);
  });

  it("leaves out what would make a line of all others, and says how many and whose", () => {
    const seen = seenOf([calm, [1.2, 9000, null, undefined]], 0, 200, "auto", false)!;
    expect([seen.outside, seen.lines, seen.percent]).toEqual([1, [1], null]);
    expect(seen.high).toBeLessThan(3);
  });

  it("leaves out a whole line that is far from most others, but none that is only worse", () => {
    const diverged = calm.map(() => 1e6);
    const worse = calm.map((value) => value + 4);
    const seen = seenOf([calm, worse, diverged, calm], 0, 200, "auto", false)!;
    expect([seen.outside, seen.lines]).toEqual([200, [2]]);
    expect(seen.high).toBeGreaterThan(5.9);
    expect(seenOf([calm, diverged], 0, 200, "all", false)!.outside).toBe(0);
  });

  it("is all where that is asked for", () => {
    const seen = seenOf([calm, [9000]], 0, 200, "all", false)!;
    expect([seen.outside, seen.high > 9000]).toEqual([0, true]);
  });

  it("is the central part where that is asked for, even of calm values", () => {
    const ramp = Array.from({ length: 101 }, (_, number) => number);
    const seen = seenOf([ramp], 0, 101, "90", false)!;
    expect([seen.low, seen.high]).toEqual([expect.closeTo(0.5), expect.closeTo(99.5)]);
    expect([seen.outside, seen.percent]).toEqual([2, 90]);
  });

  it("is of the places in sight only", () => {
    expect(seenOf([[1, 2, 9000]], 0, 2, "all", false)!.high).toBeLessThan(3);
  });

  it("judges by orders of magnitude on a logarithmic scale, where nothing below zero has a place", () => {
    const seen = seenOf([[...calm, 10, 0, -1]], 0, 300, "auto", true)!;
    expect(seen.low).toBeGreaterThan(0);
    expect(seenOf([[-1, 0]], 0, 2, "auto", true)).toBeNull();
    expect(seenOf([[]], 0, 0, "auto", false)).toBeNull();
  });

  it("has place where all values are the same", () => {
    const seen = seenOf([[0, 0]], 0, 2, "auto", false)!;
    expect(seen.low).toBeLessThan(seen.high);
    expect(seen.outside).toBe(0);
  });
});
