/** Whole tables, read page by page until the end or until the user cancels: the page may have loaded only a part of them. */
import { getBranches, getGraph, getLog, getStates, type GraphOf } from "../lib/api";
import type { Branch, Branches, GraphPage, GraphRow, State } from "../lib/types";
import type { Work } from "./offers.svelte";

const BRANCHES = 500;
const STATES = 1_000;
const ROWS = 1_000; // rows of a graph

/** Every branch that matches, in order. */
export async function eachBranch(asked: Parameters<typeof getBranches>[0], work: Work, take: (branch: Branch, whole: Branches) => void): Promise<void> {
  let after: string | null = null;
  let done = 0;
  do {
    const page: Branches = await getBranches({ ...asked, limit: BRANCHES, ...(after ? { after } : {}) }, work.signal);
    for (const branch of page.items) take(branch, page);
    work.say((done += page.items.length), page.matching);
    after = page.next;
  } while (after !== null);
}

/** Every state that a search finds, in its order. */
export async function eachFound(query: string, work: Work, take: (state: State) => void): Promise<void> {
  let after: string | null = null;
  let done = 0;
  do {
    const page: { items: State[]; next: string | null } = await getStates({ q: query, limit: STATES, ...(after ? { after } : {}) }, work.signal);
    page.items.forEach(take);
    work.say((done += page.items.length), null);
    after = page.next;
  } while (after !== null);
}

/** A state and its first parents, newest first. */
export async function eachBefore(uid: string, fields: string, work: Work, take: (state: State) => void): Promise<void> {
  let after: string | null = null;
  do {
    const page: { items: State[]; next: string | null } = await getLog(uid, { limit: STATES, fields, ...(after ? { after } : {}) }, work.signal);
    page.items.forEach(take);
    after = page.next;
  } while (after !== null);
}

/** Rows of a graph from `first` on, at most `most`. If the graph grows meanwhile, reading continues after the last row that was read: states newer than the
 first row are left out, and none comes twice. */
export async function eachRow(of: GraphOf, work: Work, take: (row: GraphRow, branch: string | null) => void, first = 0, most = Infinity): Promise<void> {
  let [at, done, version] = [first, 0, ""];
  let last: string | null = null;
  while (done < most) {
    const page: GraphPage = await getGraph(of, { first: at, count: Math.min(ROWS, most - done) }, work.signal);
    if (last !== null && page.version !== version) {
      const place: GraphPage = await getGraph(of, { around: last, count: 1 }, work.signal);
      [at, version] = [place.first + 1, place.version];
      continue;
    }
    version = page.version;
    for (const row of page.rows) take(row, row.branch < 0 ? null : (page.branches[row.branch] ?? null));
    done += page.rows.length;
    at = page.first + page.rows.length;
    last = page.rows.at(-1)?.state.uid ?? last;
    work.say(done, Math.min(most, Math.max(0, page.total - first)));
    if (!page.rows.length || at >= page.total) return;
  }
}
