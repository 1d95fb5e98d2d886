/** Which curves are shown: by a rule, by name, or by default. Pure. */

import { byRelevance } from "../../lib/relevance";

/** So many curves at once can still be told apart, at least by pointing at them. */
export const MOST = 100;
const USUAL = 8;
const KEYS = 2;
export const COUNT = 5;

export type Pick =
  | { rule: "usual" | "all" | "none" }
  | { rule: "top" | "bottom"; count: number }
  | { rule: "names"; names: readonly string[] };

/** The choice in the address: a rule takes precedence over names, and names over the heads whose history is shown. */
export function pickOf(rule: string, names: readonly string[], heads: readonly string[]): Pick {
  const said = /^(top|bottom)(\d{1,3})$/.exec(rule);
  const count = Number(said?.[2] ?? 0);
  if (said && count >= 1 && count <= MOST) return { rule: said[1] as "top" | "bottom", count };
  if (rule === "all" || rule === "none") return { rule };
  if (names.length) return { rule: "names", names };
  return heads.length ? { rule: "names", names: heads } : { rule: "usual" };
}

/** The order of branches to request from the server for it; null if none is needed. */
export function orderOf(pick: Pick, branches: number): { sort: "best" | "-best"; limit: number } | null {
  if (pick.rule === "top") return { sort: "best", limit: pick.count };
  if (pick.rule === "bottom") return { sort: "-best", limit: pick.count };
  if (pick.rule === "usual" && branches > USUAL) return { sort: "best", limit: USUAL };
  if (pick.rule === "all" && branches > MOST) return { sort: "best", limit: MOST };
  return null;
}

/** The heads that are shown. `ranked` are the branches in the requested order, null until they are known. */
export function headsOf(pick: Pick, branches: readonly string[], ranked: readonly string[] | null): string[] | null {
  if (pick.rule === "none") return [];
  if (pick.rule === "names") return [...pick.names].slice(0, MOST);
  const trunk = branches.filter((name) => ["main", "master"].includes(name));
  if (orderOf(pick, branches.length)) {
    if (!ranked) return null;
    return pick.rule === "usual" ? [...new Set([...trunk, ...ranked])].slice(0, USUAL) : [...ranked];
  }
  return [...trunk, ...byName(branches.filter((name) => !trunk.includes(name)))];
}

/** Compares names as people count: `seed-2` before `seed-10`, `lr-0.03` before `lr-0.1`. */
export function byName(names: readonly string[]): string[] {
  const split = (name: string) => name.split(/(\d+(?:\.\d+)?)/); // every second part is a number
  return names.map((name) => ({ name, parts: split(name) })).sort((one, other) => compare(one.parts, other.parts)).map(({ name }) => name);
}

function compare(one: readonly string[], other: readonly string[]): number {
  for (let index = 0; index < Math.min(one.length, other.length); index++) {
    const [first, second] = [one[index]!, other[index]!];
    const found = index % 2 ? Number(first) - Number(second) : first < second ? -1 : Number(first > second);
    if (found) return found;
  }
  return one.length - other.length;
}

/** The names that contain every word of a search, ignoring case. */
export function matching(names: readonly string[], search: string): string[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
}

/** The chosen keys, else the default ones. */
export function chosenKeys(asked: readonly string[], available: readonly string[]): string[] {
  if (asked.length) return [...asked];
  return byRelevance(available).slice(0, KEYS);
}

export const toggled = (chosen: readonly string[], one: string): string[] => (chosen.includes(one) ? chosen.filter((each) => each !== one) : [...chosen, one]);
