import { describe, expect, it } from "vitest";
import type { Value } from "../lib/types";
import { crossings, isLogSpaced, makeAxis, numberAt, numberOf, numberText, placeOf, stops, ticks, usualAxes, within, type AxisData } from "./axes";
import { rampColour } from "./ramp";

const axis = (key: string, values: Value[], kind: AxisData["kind"] = "setting") =>
  makeAxis({ key, kind, values, varies: new Set(values).size > 1, direction: kind === "metric" ? "min" : null });

describe("a scale", () => {
  it("is logarithmic where values are spaced so, and nowhere else", () => {
    expect(isLogSpaced([1e-4, 1e-3, 1e-2, 1e-1])).toBe(true);
    expect(isLogSpaced([32, 64, 128, 256, 512])).toBe(true);
    expect(isLogSpaced([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])).toBe(false);
    expect(isLogSpaced([1, 2, 3, 4, 20])).toBe(true);
    expect(isLogSpaced([0, 0.001, 0.01, 0.1])).toBe(false);
    expect(isLogSpaced([-0.1, 0.01, 10])).toBe(false);
    expect(isLogSpaced([0.01, 0.1])).toBe(false);
  });

  it("places numbers from 0 to 1, and finds them again", () => {
    const lr = axis("config.lr", [0.001, 0.01, 0.1]);
    expect(lr.isLog).toBe(true);
    expect([0.001, 0.01, 0.1].map((at) => placeOf(lr, at))).toEqual([0, expect.closeTo(0.5), 1]);
    expect(numberAt(lr, 0.5)).toBeCloseTo(0.01);
    const wd = axis("config.wd", [0, 5, 10]);
    expect([placeOf(wd, 5), numberAt(wd, 0.25), numberAt(wd, 7)]).toEqual([0.5, 2.5, 10]);
    expect(placeOf(axis("config.one", [3, 3]), 3)).toBe(0.5);
  });

  it("has categories where values are not all numbers, in an order that people expect", () => {
    const kinds = axis("config.model", ["l10", "l2", null, "l2"]);
    expect([kinds.categories, kinds.low, kinds.high]).toEqual([["l2", "l10"], 0, 1]);
    expect([numberOf(kinds, "l10"), numberOf(kinds, null), numberOf(kinds, "other")]).toEqual([1, null, null]);
    expect(axis("config.flag", [true, false]).categories).toEqual(["false", "true"]);
    expect(axis("config.mixed", ["auto", 3]).categories).toEqual(["3", "auto"]);
  });

  it("has ticks at the values where there are few, else at round numbers that can be read", () => {
    expect(ticks(axis("config.lr", [0.001, 0.003, 0.01, 0.03])).map((tick) => tick.text)).toEqual(["0.001", "0.003", "0.01", "0.03"]);
    const many = axis("metrics.loss", Array.from({ length: 50 }, (_, place) => 0.13 + place / 50), "metric");
    expect(ticks(many).map((tick) => tick.text)).toEqual(["0.2", "0.4", "0.6", "0.8", "1"]);
    const wide = axis("metrics.loss", Array.from({ length: 50 }, (_, place) => 10 ** (place / 10 - 3)), "metric");
    expect(ticks(wide).map((tick) => tick.text)).toEqual(["0.001", "0.01", "0.1", "1", "10"]);
    const near = axis("metrics.loss", [1, 1.001, 1.002, 50], "metric");
    const places = ticks(near).map((tick) => tick.place);
    expect(places.every((place, index) => index === 0 || place - places[index - 1]! > 0.05)).toBe(true);
    expect(ticks(axis("config.none", [null, null]))).toEqual([]);
  });
});

it("writes numbers as somebody would have typed them", () => {
  expect([0.1, 1e-4, 12345678, 0, 0.123456, 3, -2.5e-7].map(numberText)).toEqual(["0.1", "1e-4", "1.235e7", "0", "0.1235", "3", "-2.5e-7"]);
});

describe("ranges", () => {
  const axes = [axis("config.lr", [0.1, 0.01, 0.001, null]), axis("config.model", ["a", "b", "b", "b"])];

  it("keep what has a value in all of them, their ends included", () => {
    expect(within(axes, [], 4)).toEqual([true, true, true, true]);
    expect(within(axes, [{ key: "config.lr", low: 0.001, high: 0.01 }], 4)).toEqual([false, true, true, false]);
    expect(within(axes, [{ key: "config.lr", low: 0.01, high: 1 }, { key: "config.model", low: 1, high: 1 }], 4)).toEqual([false, true, false, false]);
  });

  it("of axes that are not there keep everything", () => {
    expect(within(axes, [{ key: "config.gone", low: 0, high: 1 }], 4)).toEqual([true, true, true, true]);
  });
});

describe("lines", () => {
  it("through one of few values are set apart in the order that is asked for, and stay nearest to it", () => {
    const values = Array.from({ length: 60 }, (_, line) => line % 3);
    const lines = axis("config.layers", values);
    const places = crossings(lines, values.map((_, line) => -line));
    expect(new Set(places).size).toBe(60);
    places.forEach((place, line) => expect(Math.abs((place ?? 0) * 2 - values[line]!)).toBeLessThan(0.5));
    const first = places.flatMap((place, line) => (values[line] === 1 ? [place!] : []));
    expect(first).toEqual([...first].sort((one, other) => other - one));
  });

  it("through many values cross where they are, and have no place without one", () => {
    const values = [...Array.from({ length: 20 }, (_, line) => line), null];
    const places = crossings(axis("metrics.loss", values, "metric"), values);
    expect(places[19]).toBe(1);
    expect(places[20]).toBeNull();
  });

  it("are drawn over what varies: settings, then the first metrics", () => {
    const axes = [axis("config.same", [1, 1]), axis("config.lr", [1, 2]), ...["a", "b", "c", "d"].map((key) => axis(`metrics.${key}`, [1, 2], "metric"))];
    expect(usualAxes(axes).map((one) => one.label)).toEqual(["lr", "a", "b", "c"]);
    expect(stops(axes[0]!)).toEqual([1]);
  });
});

describe("colours", () => {
  it("go from one end of the ramp to the other", () => {
    expect([rampColour(0), rampColour(0.25), rampColour(1), rampColour(7)]).toEqual(["var(--ramp-0)", "var(--ramp-1)", "var(--ramp-4)", "var(--ramp-4)"]);
    expect(rampColour(0.125)).toBe("color-mix(in oklab, var(--ramp-1) 50%, var(--ramp-0))");
    expect(rampColour(null)).toBe("var(--edge)");
  });
});
