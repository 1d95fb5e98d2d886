/** What a filter finds, in its order: pages that follow each other as one scrolls. */
import { getStates } from "./api";
import { asProblem, type Problem } from "./problem";
import type { State } from "./types";

const PAGE = 200;

class Found {
  states = $state.raw<State[]>([]);
  problem = $state<Problem | null>(null);
  isLoading = $state(false);
  /** Whether more follow those that are here. */
  hasMore = $state(false);
  /** Whether a filter has been answered: until then what was there before stays. */
  isActive = $state(false);

  #query = "";
  #next: string | null = null;
  #ending = new AbortController();

  /** Find anew. What was found stays visible until the answer is here, and when the query does not parse. */
  async open(query: string): Promise<void> {
    this.#ending.abort();
    this.#ending = new AbortController();
    this.#query = query;
    this.#next = null;
    await this.#fetch((items) => items);
  }

  /** Forget all: history is shown again. */
  close(): void {
    this.#ending.abort();
    this.states = [];
    this.problem = null;
    this.isLoading = this.hasMore = this.isActive = false;
  }

  more(): void {
    if (this.hasMore && !this.isLoading) void this.#fetch((items) => [...this.states, ...items]);
  }

  async #fetch(join: (items: State[]) => State[]): Promise<void> {
    const { signal } = this.#ending;
    this.isLoading = true;
    try {
      const page = await getStates({ q: this.#query, after: this.#next, limit: PAGE }, signal);
      if (signal.aborted) return;
      this.states = join(page.items);
      this.#next = page.next;
      this.hasMore = page.next !== null;
      this.problem = null;
      this.isActive = true;
    } catch (error) {
      if (signal.aborted) return;
      this.problem = asProblem(error);
      this.hasMore = false;
    }
    this.isLoading = false;
  }
}

export const found = new Found();
