/** What a filter finds, in its order: pages that follow each other as the user scrolls. Pages that were not looked at for long are dropped, and read again by
 their cursors: so the user can reach the last of very many states, and the first again. */
import { getStates } from "./api";
import { Rows } from "./blocks";
import { asProblem, type Problem } from "./problem";
import type { State } from "./types";

const PAGE = 200;
const LARGE = 1_000;
const AHEAD = 50;

/** A page that was read: where it begins, and how to read it again. */
interface Page {
  first: number;
  after: string | null;
  limit: number;
}

class Found {
  /** How many states are known to be found so far. */
  count = $state(0);
  problem = $state<Problem | null>(null);
  isLoading = $state(false);
  /** Whether more states follow the known ones. */
  hasMore = $state(false);
  /** Whether a filter has been answered: until then, the earlier rows stay. */
  isActive = $state(false);
  /** Whether all that follows is being counted, in order to reach its end. */
  isEnding = $state(false);
  /** The filter whose answer is loaded. */
  answered = $state("");

  /** Changes when the loaded rows do. */
  #tick = $state(0);
  #rows = new Rows<State>();
  #pages: Page[] = [];
  #query = "";
  #next: string | null = null;
  #ending = new AbortController();
  /** The pages that are being read again, by where they begin. */
  #asked = new Map<number, Promise<void>>();
  /** The page that follows, while it is read: the next one begins where it ends. */
  #following: Promise<void> = Promise.resolve();

  /** Undefined: the state is not loaded, or not any more; `show` loads it. */
  stateAt(index: number): State | undefined {
    void this.#tick;
    return this.#rows.at(index);
  }

  indexOf(uid: string): number | null {
    void this.#tick;
    for (const [index, state] of this.#rows.entries()) if (state.uid === uid) return index;
    return null;
  }

  /** Searches anew. The earlier result stays visible until the answer comes, and when the query does not parse. */
  async open(query: string): Promise<void> {
    this.#ending.abort();
    this.#ending = new AbortController();
    this.#query = query;
    this.isEnding = false;
    await this.#follow(null, PAGE, true);
  }

  /** Forgets everything: the history is shown again. */
  close(): void {
    this.#ending.abort();
    this.#forget();
    this.count = 0;
    this.problem = null;
    this.isLoading = this.hasMore = this.isActive = this.isEnding = false;
  }

  /** Loads the states from `start` to before `end`, and those that follow soon. */
  async show(start: number, end: number): Promise<void> {
    const { signal } = this.#ending;
    if (end >= this.count - AHEAD && this.hasMore && !this.isLoading) this.#following = this.#follow(this.#next, PAGE, false);
    const missing = this.#pages.filter(({ first, limit }) => first < end && first + limit > start && this.#lacks(Math.max(first, start), Math.min(first + limit, end)));
    await Promise.all(missing.map((page) => this.#again(page, signal)));
  }

  /** Counts everything that follows; `stop` ends it. What is loaded by then can be shown. */
  async toEnd(): Promise<void> {
    this.isEnding = true;
    const { signal } = this.#ending;
    await this.#following;
    while (this.isEnding && this.hasMore && !signal.aborted) await this.#follow(this.#next, LARGE, false, "uid");
    if (!signal.aborted) this.isEnding = false;
  }

  stop(): void {
    this.isEnding = false;
  }

  #lacks(start: number, end: number): boolean {
    for (let index = start; index < Math.min(end, this.count); index++) if (!this.#rows.at(index)) return true;
    return false;
  }

  #forget(): void {
    this.#rows.clear();
    this.#pages = [];
    this.#asked.clear();
    this.#next = null;
    this.#tick += 1;
  }

  /** Reads the page that follows; with `fields` only to know where it ends. */
  async #follow(after: string | null, limit: number, isFirst: boolean, fields?: string): Promise<void> {
    const { signal } = this.#ending;
    const query = this.#query;
    this.isLoading = true;
    try {
      const page = await getStates({ q: query, after, limit, ...(fields ? { fields } : {}) }, signal);
      if (signal.aborted) return;
      if (isFirst) {
        this.#forget();
        this.count = 0;
      }
      this.#pages.push({ first: this.count, after, limit: page.items.length });
      if (!fields) this.#rows.put(this.count, page.items);
      this.count += page.items.length;
      this.#next = page.next;
      this.hasMore = page.next !== null;
      this.problem = null;
      this.answered = query;
      this.isActive = true;
      this.#tick += 1;
    } catch (error) {
      if (signal.aborted) return;
      this.problem = asProblem(error);
      this.hasMore = false;
    }
    this.isLoading = false;
  }

  #again(page: Page, signal: AbortSignal): Promise<void> {
    const asked = this.#asked.get(page.first) ?? this.#readAgain(page, signal);
    this.#asked.set(page.first, asked);
    return asked;
  }

  async #readAgain(page: Page, signal: AbortSignal): Promise<void> {
    try {
      const { items } = await getStates({ q: this.answered, after: page.after, limit: page.limit }, signal);
      if (signal.aborted || !this.#pages.includes(page)) return;
      this.#rows.put(page.first, items);
      this.#tick += 1;
    } catch (error) {
      if (!signal.aborted) this.problem = asProblem(error);
    } finally {
      this.#asked.delete(page.first);
    }
  }
}

export const found = new Found();
