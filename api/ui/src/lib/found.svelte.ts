/** What a filter finds, in its order: pages that follow each other as one scrolls. */
import { getStates } from "./api";
import { asProblem, type Problem } from "./problem";
import type { State } from "./types";

const PAGE = 200;
const LARGE = 1_000;
/** As many states as a tab can hold with ease. */
const MOST = 100_000;

class Found {
  states = $state.raw<State[]>([]);
  problem = $state<Problem | null>(null);
  isLoading = $state(false);
  /** Whether more follow those that are here. */
  hasMore = $state(false);
  /** Whether a filter has been answered: until then what was there before stays. */
  isActive = $state(false);
  /** Whether all that follows is being fetched, to reach its end. */
  isEnding = $state(false);
  /** The filter whose answer is here. */
  answered = $state("");

  #query = "";
  #next: string | null = null;
  #ending = new AbortController();

  /** Find anew. What was found stays visible until the answer is here, and when the query does not parse. */
  async open(query: string): Promise<void> {
    this.#ending.abort();
    this.#ending = new AbortController();
    this.#query = query;
    this.#next = null;
    this.isEnding = false;
    await this.#fetch((items) => items, PAGE);
  }

  /** Forget all: history is shown again. */
  close(): void {
    this.#ending.abort();
    this.states = [];
    this.problem = null;
    this.isLoading = this.hasMore = this.isActive = this.isEnding = false;
  }

  more(): void {
    if (this.hasMore && !this.isLoading) void this.#append(PAGE);
  }

  /** Fetch all that follows; `stop` ends it. What is here by then can be shown. */
  async toEnd(): Promise<void> {
    this.isEnding = true;
    const { signal } = this.#ending;
    while (this.isEnding && this.hasMore && !signal.aborted && this.states.length < MOST) await this.#append(LARGE);
    if (!signal.aborted) this.isEnding = false;
  }

  stop(): void {
    this.isEnding = false;
  }

  #append(limit: number): Promise<void> {
    return this.#fetch((items) => [...this.states, ...items], limit);
  }

  async #fetch(join: (items: State[]) => State[], limit: number): Promise<void> {
    const { signal } = this.#ending;
    const query = this.#query;
    this.isLoading = true;
    try {
      const page = await getStates({ q: query, after: this.#next, limit }, signal);
      if (signal.aborted) return;
      this.states = join(page.items);
      this.#next = page.next;
      this.hasMore = page.next !== null;
      this.problem = null;
      this.answered = query;
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
