/** What the table shows: the history, or what a filter finds, through one interface. */
import { facts } from "../lib/facts.svelte";
import { found } from "../lib/found.svelte";
import { history } from "../lib/history.svelte";
import { isPassing } from "../lib/problem";
import { withOrder } from "../lib/query";
import type { GraphRow, Ref, State } from "../lib/types";
import { change, view } from "../lib/view.svelte";

class Shown {
  /** A filter or a sort makes this a search. */
  readonly isWanted = $derived(view.query.trim() !== "" || view.sort !== "");
  /** Whether the search's result is shown. Until its first answer the history stays. */
  readonly isSearch = $derived(this.isWanted && found.isActive);
  readonly query = $derived(withOrder(view.query, view.sort));
  readonly total = $derived(this.isSearch ? found.count : history.total);
  readonly problem = $derived(this.isWanted ? (found.problem ?? history.problem) : history.problem);
  readonly isLoading = $derived(this.isSearch ? found.isLoading : history.isLoading);
  /** Whether the rows do not match the filter because its request failed. */
  readonly isStale = $derived(this.isWanted && found.problem !== null && (!found.isActive || found.answered !== this.query));
  readonly isEmpty = $derived(!this.isLoading && this.total === 0 && this.problem === null);

  stateAt(index: number): State | undefined {
    return this.isSearch ? found.stateAt(index) : history.stateAt(index);
  }

  rowAt(index: number): GraphRow | undefined {
    return this.isSearch ? undefined : history.rowAt(index);
  }

  indexOf(uid: string): number | null {
    return (this.isSearch ? found.indexOf(uid) : history.indexOf(uid)) ?? null;
  }

  /** Fetches rows. */
  async show(start: number, end: number): Promise<void> {
    await (this.isSearch ? found : history).show(start, end);
  }

  /** The names of a row: as the history reported them with it, so that a name is never shown where the rows no longer have it. */
  refsAt(index: number, uid: string): readonly Ref[] {
    const row = this.rowAt(index);
    if (!row) return facts.refsOf(uid);
    const tags = facts.refsOf(uid).filter((ref) => ref.kind === "tag"); // tags stay where they are: one that was just made is shown at once
    return row.count > 1 ? [] : [...row.refs.filter((ref) => ref.kind === "branch"), ...tags];
  }

  /** The branch of a state, if it is known. */
  branchOf(uid: string): string | null {
    const index = history.indexOf(uid);
    const row = index === undefined ? undefined : history.rowAt(index);
    return row ? history.branch(row.branch) : null;
  }

  /** Repeats what failed, as when the server is back. */
  mend(): void {
    if (this.isWanted && found.problem && isPassing(found.problem)) void found.open(this.query);
    if (history.problem && isPassing(history.problem)) void history.open();
  }

  /** Starts anew, as after an error. */
  reload(): void {
    if (this.isWanted) void found.open(this.query);
    if (history.problem || !this.isWanted) void history.open();
    facts.reload().catch(() => {}); // the error is the one that the rows' own request met, and that is shown
  }
}

export const shown = new Shown();

/** Leaves the filter and the sort, and shows a state among its neighbours. */
export function showInHistory(uid: string): void {
  change({ query: "", sort: "", selected: uid });
}
