/** One scroll position for rows of one height, even for more rows than a browser can make an element high for.
 *
 * Together the rows are `full` pixels high; the element is `height` pixels high, at most `LIMIT`. Where the two differ, a small move of the
 * element moves the rows equally far, a large one (the scroll bar was dragged) moves them in proportion, and `settle` returns where the
 * element belongs once it rests. Pure: the component that scrolls calls it.
 */

export const ROW = 28;
export const LIMIT = 15_000_000; // Firefox gives up at 17.9 million pixels, Chromium at 33.5

export class Scale {
  readonly full: number;
  readonly height: number;
  #physical = 0;
  #offset = 0;

  constructor(readonly rows: number, readonly viewport: number, readonly limit: number = LIMIT) {
    this.full = rows * ROW;
    this.height = Math.min(this.full, limit);
  }

  get isExact(): boolean {
    return this.full === this.height;
  }

  /** How many pixels of rows are above the visible part. */
  get offset(): number {
    return this.#offset;
  }

  /** The position of a row within the element. */
  topOf(index: number): number {
    return this.isExact ? index * ROW : index * ROW - this.#offset + this.#physical;
  }

  /** The element was scrolled to `physical`. */
  scrolled(physical: number): void {
    const moved = physical - this.#physical;
    const isSmall = Math.abs(moved) <= 2 * this.viewport && physical > 0 && physical < this.height - this.viewport;
    this.#physical = physical;
    if (this.isExact) this.#offset = physical;
    else this.#offset = this.#clamp(isSmall ? this.#offset + moved : physical * this.#ratio());
  }

  /** Shows `offset`; returns the position to scroll the element to. */
  aim(offset: number): number {
    this.#offset = this.#clamp(offset);
    this.#physical = this.isExact ? this.#offset : Math.round(this.#offset / this.#ratio());
    return this.#physical;
  }

  /** The position of the element once it rests, so that the scroll bar is correct and both ends can be reached. */
  settle(): number {
    return this.isExact ? this.#physical : this.aim(this.#offset);
  }

  #clamp(offset: number): number {
    return Math.max(0, Math.min(offset, this.full - this.viewport));
  }

  #ratio(): number {
    return Math.max(1, (this.full - this.viewport) / Math.max(1, this.height - this.viewport));
  }
}

/** The rows to keep in the page: the visible ones, and at least `extra` on both sides. They change by `extra` rows, not by each one. */
export function seen(offset: number, viewport: number, total: number, extra: number): { start: number; end: number } {
  const first = Math.floor(offset / ROW / extra) * extra - extra;
  const last = Math.ceil((offset + viewport) / ROW / extra) * extra + extra;
  return { start: Math.max(0, first), end: Math.min(total, last) };
}
