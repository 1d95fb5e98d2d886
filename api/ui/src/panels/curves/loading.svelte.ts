/** Curves as they come: some heads at a time, so that the first appear while others are read, and the rest can be skipped. */
import { getSeries } from "../../lib/api";
import { asProblem, type Problem } from "../../lib/problem";
import type { Fork, SeriesLine } from "../../lib/types";
import { keyChunks, mostAtOnce, nextSize, pointsOf } from "./chunks";

export interface Question {
  heads: readonly string[];
  keys: readonly string[];
  x: "step" | "time" | "epoch";
  shape: "extremes" | "means";
  group: string;
}

const KEPT = 200; // heads; more than are ever shown at once

class Loading {
  /** The loaded lines, and the request that they answer. */
  lines = $state.raw<readonly SeriesLine[]>([]);
  question = $state.raw<Question | null>(null);
  /** The steps that branches lost with a process that died: lines of their own. */
  lost = $state.raw<readonly SeriesLine[]>([]);
  forks = $state.raw<readonly Fork[]>([]);
  done = $state(0);
  total = $state(0);
  busy = $state(false);
  /** Whether the user asked to skip what is missing. */
  isStopped = $state(false);
  problem = $state.raw<Problem | null>(null);
  /** Heads that name nothing. */
  gone = $state.raw<readonly string[]>([]);

  #kept = new Map<string, Map<string, SeriesLine>>();
  #lost = new Map<string, readonly SeriesLine[]>();
  #stale = new Set<string>();
  #kind = "";
  #wanted: Question | null = null;
  #running: AbortController | null = null;

  /** Reads what is wanted and not loaded; an earlier request is cancelled. */
  async ask(question: Question): Promise<void> {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    this.#wanted = question;
    const points = pointsOf(question.heads.length);
    const kind = JSON.stringify([question.x, question.shape, question.group, points]);
    if (kind !== this.#kind) {
      this.#kept.clear();
      this.#stale.clear();
    }
    this.#kind = kind;
    const missing = question.heads.filter((head) => this.#stale.has(head) || !this.#isHere(head, question));
    this.busy = missing.length > 0;
    this.isStopped = false;
    this.problem = null;
    this.gone = [];
    this.total = question.heads.length;
    if (this.#kept.size || !missing.length) this.#show(question);
    try {
      await this.#read(question, missing, points, running.signal);
      await this.#readForks(question, running.signal);
    } catch (error) {
      if (this.#running !== running) return;
      this.problem = asProblem(error);
    }
    if (this.#running === running) this.busy = false;
  }

  /** Reads heads again that moved: these, or all. Their loaded lines stay until then. */
  async again(moved: ReadonlySet<string> | null): Promise<void> {
    if (!this.#wanted || this.busy || this.isStopped) return;
    for (const head of this.#wanted.heads) if (!moved || moved.has(head) || /[~^@]/.test(head)) this.#stale.add(head);
    await this.ask(this.#wanted);
  }

  /** Skips what is not loaded yet. */
  stop(): void {
    this.#running?.abort();
    this.#running = null;
    this.busy = false;
    this.isStopped = true;
  }

  forget(): void {
    this.#running?.abort();
    this.#running = null;
    this.#wanted = null;
    this.#kept.clear();
    this.lines = this.lost = [];
    this.forks = [];
    this.question = this.problem = null;
    this.busy = this.isStopped = false;
  }

  async #read(question: Question, missing: readonly string[], points: number, signal: AbortSignal): Promise<void> {
    const { keys, x, shape, group } = question;
    const most = mostAtOnce(points, keys.length);
    let size = 1;
    for (let first = 0; first < missing.length; ) {
      const heads = missing.slice(first, first + size);
      const began = performance.now();
      try {
        const lines: SeriesLine[] = [];
        const lost: SeriesLine[] = [];
        for (const some of keyChunks(keys)) {
          const found = await getSeries({ head: heads, key: some, points, x, shape, ...(group ? { group } : {}) }, signal);
          lines.push(...found.lines);
          lost.push(...found.lost);
          if (signal.aborted) return;
        }
        for (const head of heads) {
          this.#keep(head, lines);
          this.#lost.set(head, lost.filter((line) => line.head === head));
        }
      } catch (error) {
        if (signal.aborted || asProblem(error).status !== 404) throw error;
        if (heads.length > 1) {
          size = 1;
          continue;
        }
        this.gone = [...this.gone, ...heads];
      }
      first += heads.length;
      size = nextSize(size, performance.now() - began, most);
      this.#show(question);
    }
  }

  async #readForks(question: Question, signal: AbortSignal): Promise<void> {
    const heads = question.heads.filter((head) => this.#kept.has(head));
    const forks = heads.length > 1 ? (await getSeries({ head: heads }, signal)).forks : [];
    if (!signal.aborted) this.forks = forks;
  }

  #keep(head: string, lines: readonly SeriesLine[]): void {
    this.#kept.delete(head);
    this.#kept.set(head, new Map(lines.filter((line) => line.head === head).map((line) => [line.key, line])));
    this.#stale.delete(head);
    for (const oldest of this.#kept.keys()) {
      if (this.#kept.size <= KEPT) break;
      this.#kept.delete(oldest);
    }
  }

  #isHere(head: string, { keys }: Question): boolean {
    const kept = this.#kept.get(head);
    return kept !== undefined && keys.every((key) => kept.has(key));
  }

  #show(question: Question): void {
    const here = question.heads.filter((head) => this.#isHere(head, question));
    this.lines = here.flatMap((head) => question.keys.map((key) => this.#kept.get(head)!.get(key)!));
    this.lost = here.flatMap((head) => this.#lost.get(head) ?? []);
    this.question = question;
    this.done = here.length + this.gone.length;
  }
}

export const loading = new Loading();
