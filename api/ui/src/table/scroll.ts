/** One scroll position for rows of one height, also for more of them than a browser can make an element high for.
 *
 * All rows would stand below each other in `full` pixels; the element is `height` pixels high, at most `LIMIT`. Where the two differ
 * a small move of the element moves the rows as far, a large one (the scroll bar was dragged) moves them in proportion, and `settle`
 * says where the element belongs once it rests. Pure: who scrolls tells it.
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

  /** How many pixels of rows are above what is seen. */
  get offset(): number {
    return this.#offset;
  }

  /** Where a row stands within the element. */
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

  /** Show `offset`; gives where the element is to be scrolled to. */
  aim(offset: number): number {
    this.#offset = this.#clamp(offset);
    this.#physical = this.isExact ? this.#offset : Math.round(this.#offset / this.#ratio());
    return this.#physical;
  }

  /** Where the element belongs once it rests, so that the scroll bar tells the truth and both ends can be reached. */
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

/** The rows to have in the page: those that are seen, and at least `extra` on both sides. They change by `extra` rows, not by each one. */
export function seen(offset: number, viewport: number, total: number, extra: number): { start: number; end: number } {
  const first = Math.floor(offset / ROW / extra) * extra - extra;
  const last = Math.ceil((offset + viewport) / ROW / extra) * extra + extra;
  return { start: Math.max(0, first), end: Math.min(total, last) };
}
