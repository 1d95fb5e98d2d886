/** Which rows of a long list are loaded, and which must be fetched; pure, so that fetching can be tested without a server. */

export const BLOCK = 200;

/** Rows by index, of one version of a graph. When there are too many, the least recently used leave. */
export class Rows<T> {
  readonly #rows = new Map<number, T>();
  constructor(readonly capacity = 40_000) {}

  get size(): number {
    return this.#rows.size;
  }

  at(index: number): T | undefined {
    return this.#rows.get(index);
  }

  put(first: number, rows: readonly T[]): void {
    rows.forEach((row, offset) => {
      this.#rows.delete(first + offset);
      this.#rows.set(first + offset, row);
    });
    for (const index of this.#rows.keys()) {
      if (this.#rows.size <= this.capacity) break;
      this.#rows.delete(index);
    }
  }

  clear(): void {
    this.#rows.clear();
  }

  entries(): IterableIterator<[number, T]> {
    return this.#rows.entries();
  }

  /** The first rows of the blocks that must be fetched to show rows from `start` to before `end` out of `total`. */
  missing(start: number, end: number, total: number): number[] {
    const firsts: number[] = [];
    const last = Math.min(end, total);
    for (let first = Math.floor(Math.max(0, start) / BLOCK) * BLOCK; first < last; first += BLOCK) {
      const until = Math.min(first + BLOCK, last);
      for (let index = Math.max(first, start); index < until; index++) {
        if (!this.#rows.has(index)) {
          firsts.push(first);
          break;
        }
      }
    }
    return firsts;
  }
}
