/** Tables as CSV (RFC 4180, UTF-8): numbers in full, and no text that a spreadsheet would take for a formula. Pure. */

export type Cell = string | number | boolean | null | undefined;

const FORMULA = /^[=+\-@\t\r]/;
const QUOTED = /[",\r\n]/;
const PIECE = 1 << 20; // letters

/** One cell. A missing value is empty; a number is written so that reading it gives the same number; a text that begins like a formula gets an apostrophe. */
export function cellText(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const harmless = FORMULA.test(value) ? `'${value}` : value;
  return QUOTED.test(harmless) ? `"${harmless.replaceAll('"', '""')}"` : harmless;
}

/** A number that JSON could not express: null is NaN or infinite, undefined means that there is none. */
export const measured = (value: number | null | undefined): Cell => (value === null ? "NaN" : value);

/** A table that is written row by row, so that a long one is never held in memory as rows. */
export class Sheet {
  rows = 0;
  #done: string[] = [];
  #last = "";

  constructor(header: readonly string[]) {
    this.#line(header);
  }

  add(row: readonly Cell[]): void {
    this.#line(row);
    this.rows += 1;
  }

  /** The parts of the text, in order. */
  parts(): string[] {
    return [...this.#done, this.#last];
  }

  text(): string {
    return this.parts().join("");
  }

  #line(cells: readonly Cell[]): void {
    this.#last += `${cells.map(cellText).join(",")}\r\n`;
    if (this.#last.length < PIECE) return;
    this.#done.push(this.#last);
    this.#last = "";
  }
}
