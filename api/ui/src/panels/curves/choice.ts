/** Which curves are shown when the address does not say it. Pure. */

import { byRelevance } from "../../lib/relevance";

const HEADS = 8;
const KEYS = 2;

/** The heads that were chosen; else the first branches, `main` before all. */
export function chosenHeads(asked: readonly string[], branches: readonly string[]): string[] {
  if (asked.length) return [...asked];
  const first = branches.filter((name) => ["main", "master"].includes(name));
  return [...first, ...branches.filter((name) => !first.includes(name))].slice(0, HEADS);
}

/** The keys that were chosen; else those that one looks for first. */
export function chosenKeys(asked: readonly string[], available: readonly string[]): string[] {
  if (asked.length) return [...asked];
  return byRelevance(available).slice(0, KEYS);
}

export const toggled = (chosen: readonly string[], one: string): string[] => (chosen.includes(one) ? chosen.filter((each) => each !== one) : [...chosen, one]);
