import { describe, expect, it } from "vitest";
import { backoff, EventReader } from "./stream";

describe("event stream", () => {
  it("gives an event once it is whole, wherever the pieces end", () => {
    const reader = new EventReader();
    const text = 'event: ref\nid: 7\ndata: {"a":\ndata: 1}\n\n';
    const given = [...text].flatMap((letter) => reader.read(letter));
    expect(given).toEqual([{ event: "ref", id: "7", data: '{"a":\n1}' }]);
  });

  it("drops comments, and reads other ends of lines", () => {
    expect(new EventReader().read(": still here\n\nid: 1\r\ndata: x\r\n\r\n")).toEqual([{ event: "message", id: "1", data: "x" }]);
  });

  it("waits longer each time, up to a limit, never at the same moment as others", () => {
    expect([0, 1, 10].map((attempt) => backoff(attempt, () => 1))).toEqual([500, 1000, 15_000]);
    expect(backoff(10, () => 0)).toBe(7_500);
  });
});
