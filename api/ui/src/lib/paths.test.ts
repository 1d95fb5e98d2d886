import { describe, expect, it } from "vitest";
import { etagOf, etagOfNote, inPath } from "./paths";

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

describe("the tag of a note", () => {
  it("is the time of its last edit, or of its creation", () => {
    const note = { created_at: "2026-11-28T10:00:00.000001Z", edited_at: null };
    expect(etagOfNote(note)).toBe('"2026-11-28T10:00:00.000001Z"');
    expect(etagOfNote({ ...note, edited_at: "2026-11-28T11:00:00Z" })).toBe('"2026-11-28T11:00:00Z"');
  });
});
