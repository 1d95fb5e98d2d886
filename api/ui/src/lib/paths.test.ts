import { describe, expect, it } from "vitest";
import { etagOf, inPath } from "./paths";

describe("names in addresses", () => {
  it("keep their slashes", () => {
    expect(inPath("exp/größe #1%2F.x")).toBe("exp/gr%C3%B6%C3%9Fe%20%231%252F.x");
  });

  it("are refused where a browser would ask for another name", () => {
    for (const name of ["a/./b", "a/../b", "."]) expect(() => inPath(name)).toThrow("no address");
  });
});

describe("the tag of a ref", () => {
  it("tells what it must still be", () => {
    expect(etagOf({ kind: "tag", version: 2, state: "ab".repeat(12) })).toBe('"tag-2-abababababababababababab"');
  });
});
