/** The history of the chosen heads: rows of the server's graph, fetched a block at a time, of one version at a time. */
import { getGraph, type GraphOf } from "./api";
import { facts } from "./facts.svelte";
import { BLOCK, Rows } from "./blocks";
import { asProblem, type Problem } from "./problem";
import type { GraphPage, GraphRow, State } from "./types";
import { view } from "./view.svelte";

/** What the reader looks at: it stays in place when rows appear above it. */
export interface Anchor {
  uid: string;
  index: number;
}

class History {
  total = $state(0);
  /** How many states the rows stand for. */
  states = $state(0);
  lanes = $state(0);
  /** How many states have appeared above what is shown. */
  fresh = $state(0);
  problem = $state<Problem | null>(null);
  isLoading = $state(true);
  /** A state that was looked up and is not in the history of these heads. */
  outside = $state<string | null>(null);
  /** A state that was looked up and is part of a folded stretch. */
  inside = $state<string | null>(null);
  /** Changes whenever a row does; a component that draws rows reads it. */
  tick = $state(0);
  /** Set by the component that shows the rows: what to keep in place, and by how many rows it moved. */
  anchor: () => Anchor | null = () => null;
  moved: (rows: number) => void = () => {};

  /** Identifies these rows: changes when the graph or a name does. */
  version = $state("");

  #rows = new Rows<GraphRow>();
  #branches = new Map<number, string>();
  #indexes = new Map<string, number>();
  #version = "";
  #asked = new Map<number, Promise<void>>();
  #ending = new AbortController();

  rowAt(index: number): GraphRow | undefined {
    return this.#rows.at(index);
  }

  /** The name of a branch that a row refers to. */
  branch(key: number): string | null {
    return this.#branches.get(key) ?? null;
  }

  /** The parameters of the wanted graph. */
  wanted(): GraphOf {
    const fold = view.scene === "graph";
    const best = facts.best && fold ? [facts.best.uid] : [];
    return { heads: view.heads, fold, opened: fold ? view.opened : [], alone: fold ? [...new Set([...view.alone, ...best])] : [] };
  }

  stateAt(index: number): State | undefined {
    return this.#rows.at(index)?.state;
  }

  /** The position of a state, if its row is loaded. */
  indexOf(uid: string): number | undefined {
    const index = this.#indexes.get(uid);
    return index !== undefined && this.#rows.at(index)?.state.uid === uid ? index : undefined;
  }

  /** Starts anew: another repository, or other heads. */
  async open(): Promise<void> {
    this.#ending.abort();
    this.#ending = new AbortController();
    this.#forget("");
    this.total = this.lanes = this.fresh = 0;
    this.isLoading = true;
    this.problem = this.outside = this.inside = null;
    await this.#try(async () => this.#take(await this.#get({ first: 0 })));
    this.isLoading = false;
  }

  /** Fetches the rows from `start` to before `end`. */
  async show(start: number, end: number): Promise<void> {
    await Promise.all(this.#rows.missing(start, end, this.total).map((first) => this.#block(first)));
  }

  /** A block of rows; requested once, however often it is wanted meanwhile. */
  #block(first: number): Promise<void> {
    const asked = this.#asked.get(first);
    if (asked) return asked;
    const version = this.#version;
    const answer = this.#try(async () => {
      const page = await this.#get({ first });
      if (page.version === this.#version) this.#take(page);
      else if (version === this.#version) await this.refresh();
    }).finally(() => this.#asked.get(first) === answer && this.#asked.delete(first));
    this.#asked.set(first, answer);
    return answer;
  }

  /** Takes the newest version. What the reader looks at stays in place, unless that is the top: then the newest is shown. */
  async refresh(follow = false): Promise<void> {
    await this.#try(async () => {
      const held = follow ? null : this.anchor();
      const page = await this.#get(held ? { around: held.uid } : { first: 0 });
      this.#forget(page.version);
      this.#take(page);
      this.fresh = 0;
      const now = held ? this.indexOf(held.uid) : undefined;
      if (held && now !== undefined && now !== held.index) this.moved(now - held.index);
    });
  }

  /** Checks for new rows and counts them, without showing them. */
  async check(): Promise<void> {
    await this.#try(async () => {
      const page = await this.#get({ first: 0, count: 1 });
      if (page.version === this.#version) return;
      if (page.states > this.states) this.fresh = page.states - this.states;
      else await this.refresh();
    });
  }

  /** The position of a state, asking the server if need be; null if it is not in this history. */
  async locate(uid: string): Promise<number | null> {
    const known = this.indexOf(uid);
    if (known !== undefined) return known;
    this.outside = this.inside = null;
    await this.#try(async () => {
      try {
        const page = await this.#get({ around: uid });
        if (page.version !== this.#version) this.#forget(page.version);
        this.#take(page);
        if (this.indexOf(uid) === undefined) this.inside = uid;
      } catch (error) {
        if (asProblem(error).status !== 404) throw error;
        this.outside = uid;
      }
    });
    return this.indexOf(uid) ?? null;
  }

  #get(window: { first?: number; around?: string; count?: number }): Promise<GraphPage> {
    return getGraph(this.wanted(), { count: BLOCK, ...window }, this.#ending.signal);
  }

  #take(page: GraphPage): void {
    this.#version = this.version = page.version;
    for (const [key, name] of Object.entries(page.branches)) this.#branches.set(Number(key), name);
    this.#rows.put(page.first, page.rows);
    page.rows.forEach((row, offset) => this.#indexes.set(row.state.uid, page.first + offset));
    this.total = page.total;
    this.states = page.states;
    this.lanes = page.lanes;
    this.problem = null;
    this.tick += 1;
  }

  #forget(version: string): void {
    this.#version = version;
    this.#rows.clear();
    this.#branches.clear();
    this.#indexes.clear();
    this.#asked.clear();
    this.tick += 1;
  }

  async #try(act: () => Promise<void>): Promise<void> {
    const { signal } = this.#ending;
    try {
      await act();
    } catch (error) {
      if (!signal.aborted) this.problem = asProblem(error);
    }
  }
}

export const history = new History();
