/** The summaries of branches, as the view asks for them: pages that follow each other. */
import { getBranches } from "./api";
import { asProblem, type Problem } from "./problem";
import type { Branch, Branches } from "./types";
import { view } from "./view.svelte";

const PAGE = 100;

class BranchList {
  items = $state.raw<Branch[]>([]);
  /** What the first page said of all branches. */
  whole = $state.raw<Branches | null>(null);
  problem = $state<Problem | null>(null);
  isLoading = $state(false);

  #next: string | null = null;
  /** Whether something has changed since the request under way was sent. */
  #isStale = false;
  #ending = new AbortController();

  /** Reads anew, as many as were loaded, so that nothing jumps. The old rows stay until the answer comes. */
  async open(): Promise<void> {
    this.#isStale = false;
    this.#ending.abort();
    this.#ending = new AbortController();
    const wanted = Math.max(PAGE, Math.min(500, this.items.length));
    await this.#fetch(null, wanted);
  }

  /** The lineage changed. A request under way is answered first: a slow one that was cancelled at each change would never finish. */
  async refresh(): Promise<void> {
    this.#isStale = this.isLoading;
    if (!this.isLoading) await this.open();
  }

  async more(): Promise<void> {
    if (this.#next !== null && !this.isLoading) await this.#fetch(this.#next, PAGE);
  }

  /** The parameters of the request, except the number. */
  wanted(): Parameters<typeof getBranches>[0] {
    return { q: view.query, sort: view.by || "changed", ...(view.metric ? { metric: view.metric } : {}), ...(view.group ? { group: view.group } : {}) };
  }

  get hasMore(): boolean {
    return this.whole !== null && this.items.length < this.whole.matching;
  }

  forget(): void {
    this.#ending.abort();
    this.items = [];
    this.whole = this.problem = null;
    this.isLoading = this.#isStale = false;
  }

  async #fetch(after: string | null, limit: number): Promise<void> {
    const { signal } = this.#ending;
    this.isLoading = true;
    try {
      const page = await getBranches({ ...this.wanted(), limit, ...(after ? { after } : {}) }, signal);
      if (signal.aborted) return;
      this.items = after === null ? page.items : [...this.items, ...page.items];
      this.#next = page.next;
      this.whole = page;
      this.problem = null;
    } catch (error) {
      if (signal.aborted) return;
      this.problem = asProblem(error);
    }
    this.isLoading = false;
    if (this.#isStale) await this.open();
  }
}

export const branchList = new BranchList();
