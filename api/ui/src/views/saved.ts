/** Views that the user has named: stored in this browser, for each repository, as the addresses that show them. */
import { DEFAULTS, parseAddress, writeAddress, type View } from "../lib/address";

export interface Saved {
  name: string;
  address: string;
}

export const MOST = 50;
const LONGEST = 80;
const keyOf = (repository: string) => `datastates.views.${repository}`;

/** The views of a repository, by name; impossible entries in the browser's storage are left out. */
export function savedViews(repository: string, store: Pick<Storage, "getItem">): Saved[] {
  try {
    const kept: unknown = JSON.parse(store.getItem(keyOf(repository)) ?? "[]");
    return Array.isArray(kept) ? kept.filter(isSaved).slice(0, MOST) : [];
  } catch {
    return [];
  }
}

/** The list with a view under a name; one of that name is replaced. */
export function withView(views: readonly Saved[], name: string, view: View): Saved[] {
  const kept = { name: tidy(name), address: writeAddress({ ...view, theme: DEFAULTS.theme }) };
  return [...views.filter((one) => one.name !== kept.name), kept].sort((one, other) => one.name.localeCompare(other.name));
}

/** The list with another name for a view; the same list if that name is empty or taken. */
export function renamed(views: readonly Saved[], from: string, to: string): Saved[] {
  const name = tidy(to);
  if (!name || views.some((one) => one.name === name)) return [...views];
  return views.map((one) => (one.name === from ? { ...one, name } : one));
}

export const without = (views: readonly Saved[], name: string): Saved[] => views.filter((one) => one.name !== name);

/** What a saved view shows; the theme stays the reader's. */
export function viewOf(saved: Saved, now: View): View {
  return { ...parseAddress(saved.address), repository: now.repository, theme: now.theme };
}

/** False if the browser stores nothing. */
export function keepViews(repository: string, views: readonly Saved[], store: Pick<Storage, "setItem">): boolean {
  try {
    store.setItem(keyOf(repository), JSON.stringify(views));
    return true;
  } catch {
    return false;
  }
}

export const tidy = (name: string): string => name.trim().replace(/\s+/g, " ").slice(0, LONGEST);

const isSaved = (one: unknown): one is Saved =>
  typeof one === "object" && one !== null && "name" in one && "address" in one && typeof one.name === "string" && typeof one.address === "string";
