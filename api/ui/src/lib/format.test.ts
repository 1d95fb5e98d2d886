import { describe, expect, it } from "vitest";
import { formatAge, formatBytes, formatCount, formatNumber, formatValue } from "./format";

describe("format", () => {
  it("shows numbers at the width of a column", () => {
    expect([0.123456, 12, 0.00001234, 1234567.8, -0.5, 0].map(formatNumber)).toEqual(["0.1235", "12", "1.23e-5", "1.23e6", "-0.5000", "0"]);
  });

  it("tells NaN from a metric that is not there", () => {
    expect([null, undefined].map(formatNumber)).toEqual(["NaN", ""]);
  });

  it("shows a setting as somebody would write it", () => {
    expect([0.1, 0.1 + 0.2, 3, 1e-8, 12345678, 1e9 + 1, "adam", true, null].map(formatValue)).toEqual(["0.1", "0.3", "3", "1e-8", "12345678", "1000000001", "adam", "true", "none"]);
  });

  it("shows bytes and counts", () => {
    expect([0, 1023, 1024, 352_321_536, 1.5 * 2 ** 40].map(formatBytes)).toEqual(["0 B", "1023 B", "1.0 KiB", "336 MiB", "1.5 TiB"]);
    expect(formatCount(1234567)).toBe("1\u2009234\u2009567");
  });

  it("shows ages, and none that is negative", () => {
    const now = Date.parse("2026-11-21T12:00:00Z");
    const ages = ["2026-11-21T12:00:05Z", "2026-11-21T11:59:30Z", "2026-11-21T11:00:01Z", "2026-11-21T02:00:00Z", "2026-11-01T12:00:00Z", "2024-11-01T12:00:00Z"];
    expect(ages.map((at) => formatAge(at, now))).toEqual(["now", "30 s", "59 min", "10 h", "20 d", "2 y"]);
  });
});
