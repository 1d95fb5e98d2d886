import { describe, expect, it } from "vitest";
import { BLOCK, Rows } from "./blocks";

const some = (count: number) => Array.from({ length: count }, (_, index) => index);

describe("rows", () => {
  it("asks for whole blocks, each once", () => {
    expect(new Rows<number>().missing(BLOCK - 5, BLOCK + 5, 10 * BLOCK)).toEqual([0, BLOCK]);
  });

  it("does not ask for what is here, nor for what is beyond the end", () => {
    const rows = new Rows<number>();
    rows.put(0, some(BLOCK));
    expect(rows.missing(0, 3 * BLOCK, BLOCK + 3)).toEqual([BLOCK]);
    expect(rows.missing(0, 50, 0)).toEqual([]);
  });

  it("asks for a block of which only rows out of sight are here", () => {
    const rows = new Rows<number>();
    rows.put(50, some(30)); // a window around a state
    expect(rows.missing(55, 75, 1000)).toEqual([]);
    expect(rows.missing(40, 75, 1000)).toEqual([0]);
  });

  it("forgets what was put first when there are too many", () => {
    const rows = new Rows<number>(100);
    rows.put(0, some(80));
    rows.put(500, some(40));
    expect(rows.size).toBe(100);
    expect(rows.at(0)).toBeUndefined();
    expect(rows.at(539)).toBe(39);
  });
});
