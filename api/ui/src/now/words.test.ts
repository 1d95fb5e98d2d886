import { expect, test } from "vitest";
import type { Ref } from "../lib/types";
import { beatOf, commandOf, isPin, pinName, pinOf, policyText } from "./words";

const UID = "0123456789abcdef01234567";
const ref = (name: string, kind: "tag" | "branch" = "tag", state = UID) => ({ name, kind, state, version: 1, message: null }) as Ref;
const at = Date.parse("2026-01-01T00:00:00Z");

test("a beat of just now is now, and a late one is said to be late", () => {
  expect(beatOf("2026-01-01T00:00:00Z", "running", at + 900)).toEqual({ text: "now", isLate: false });
  expect(beatOf("2026-01-01T00:00:00Z", "running", at + 9_000)).toEqual({ text: "9 s ago", isLate: false });
  expect(beatOf("2026-01-01T00:00:00Z", "running", at + 40_000)).toEqual({ text: "40 s ago", isLate: true });
  expect(beatOf("2026-01-01T00:00:00Z", "running", at + 600_000)).toEqual({ text: "10 min ago", isLate: true });
});

test("where no lease is to be seen only the kernel tells", () => {
  expect(beatOf(null, "running", at)).toEqual({ text: "lives", isLate: false });
  expect(beatOf(null, "unknown", at).isLate).toBe(true);
});

test("a pin is a tag that has its state's name, and no other", () => {
  expect(pinOf([ref("warm"), ref(pinName(UID), "branch"), ref(pinName(UID))], UID)?.kind).toBe("tag");
  expect(pinOf([ref("warm")], UID)).toBeNull();
  expect(isPin(ref(pinName(UID), "tag", "f".repeat(24)))).toBe(false);
});

test("a command is shown without the folder of its program", () => {
  expect(commandOf(["/home/me/train.py", "--lr", "0.1"])).toBe("train.py --lr 0.1");
});

test("the bound of a policy is said as people read sizes", () => {
  expect(policyText("all at-most:25465373563")).toBe("all at most 23.7 GiB");
  expect(policyText("all at-most:24718508K")).toBe("all at most 23.6 GiB");
  expect(policyText("latest:5 best:3:val_loss at-most:half")).toBe("latest:5 best:3:val_loss at-most:half");
});
