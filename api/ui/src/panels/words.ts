/** Texts of the panels beyond `lib/format`. */

export const shapeText = (shape: readonly number[]): string => (shape.length === 0 ? "scalar" : shape.join(" × "));

/** A part of 1 in per cent; a part so small that it would be shown as zero keeps its digits. */
export function percent(part: number | null): string {
  if (part === null) return "–";
  const value = part * 100;
  if (value === 0 || value >= 0.1) return `${Number(value.toFixed(value >= 100 ? 0 : 1))} %`;
  return `${Number(value.toPrecision(2))} %`;
}

/** Anything that a configuration or a state's values may hold. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return String(Number(value.toPrecision(8)));
  return typeof value === "string" ? value : JSON.stringify(value);
}

const LONG = 120; // letters; a generator's state has thousands

/** A text that is too long to read, as its beginning and its length. */
export const clipped = (text: string): string => (text.length <= LONG ? text : `${text.slice(0, 24)}… (${text.length} characters)`);

/** The singular or the plural of a word. */
export const counted = (count: number, one: string, many = `${one}s`): string => `${count} ${count === 1 ? one : many}`;
