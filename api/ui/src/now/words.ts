/** The texts of the view `now`; and what pins are. Pure. */
import { formatBytes } from "../lib/format";
import type { Ref } from "../lib/types";

const LATE_S = 15;
const PREFIX = "pinned/";
const LETTERS = 12;

/** The state of a process: its engine reports once a second that it is at work. */
export function beatOf(beatAt: string | null, life: string, now: number): { text: string; isLate: boolean } {
  if (beatAt === null) return { text: life === "running" ? "lives" : "not to be seen from here", isLate: life !== "running" };
  const age = Math.max(0, (now - Date.parse(beatAt)) / 1000);
  if (age < LATE_S) return { text: `${age < 2 ? "now" : `${Math.floor(age)} s ago`}`, isLate: false };
  return { text: age < 120 ? `${Math.floor(age)} s ago` : `${Math.floor(age / 60)} min ago`, isLate: true };
}

/** A pin is a tag: a state that a tag names is made durable, and kept. */
export const pinName = (uid: string): string => PREFIX + uid.slice(0, LETTERS);

export const isPin = (ref: Ref): boolean => ref.kind === "tag" && ref.name === pinName(ref.state);

export const pinOf = (refs: readonly Ref[], uid: string): Ref | null => refs.find((ref) => ref.state === uid && isPin(ref)) ?? null;

/** A command line for a cell, without the interpreter's path. */
export const commandOf = (argv: readonly string[]): string => argv.map((word, index) => (index === 0 ? (word.split("/").at(-1) ?? word) : word)).join(" ");

/** What a policy keeps, with its bound as people read sizes. */
export const policyText = (policy: string): string =>
  policy.replace(/\bat-most:(\d+)([KMGT]?)$/, (_, number: string, unit: string) => `at most ${formatBytes(Number(number) * 1024 ** " KMGT".indexOf(unit || " "))}`);
