/** Values as text, the same everywhere on the page. */

/** A metric: four significant digits, never wider than a column; null stands for NaN and infinities, as in JSON. */
export function formatNumber(value: number | null | undefined): string {
  if (value === undefined) return "";
  if (value === null || Number.isNaN(value)) return "NaN";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return value.toPrecision(4);
}

/** An integer with thin spaces between thousands. */
export const formatCount = (value: number): string => String(value).replace(/\B(?=(\d{3})+$)/g, "\u2009");

export function formatBytes(bytes: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = bytes;
  let unit = 0;
  while (size >= 1023.5 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

const AGES: readonly (readonly [number, string])[] = [
  [60, "s"], [60, "min"], [24, "h"], [365, "d"], [Infinity, "y"],
];

/** How long ago: `now`, `12 s`, `3 min`, `5 h`, `9 d`, `2 y`. */
export function formatAge(at: string, now: number): string {
  let age = Math.max(0, (now - Date.parse(at)) / 1000);
  if (age < 2) return "now";
  for (const [many, unit] of AGES) {
    if (age < many) return `${Math.floor(age)} ${unit}`;
    age /= many;
  }
  return "";
}

/** A moment in the reader's own time zone, to the second. */
export function formatTime(at: string): string {
  const date = new Date(at);
  const two = (value: number) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** The beginning of a uid, as the terminal abbreviates it. */
export const shortUid = (uid: string): string => uid.slice(0, 8);

/** An attribute's or a configuration's value: a number as it was written, with at most six digits after rounding. */
export const formatValue = (value: string | number | boolean | null): string =>
  typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : value === null ? "none" : String(value);

/** Whether states of this status have lost their bytes. */
export const isGone = (status: string): boolean => status === "evicted" || status === "lost";

/** What a status promises, shown when the user points at it. */
export const STATUS_MEANS: Readonly<Record<string, string>> = {
  captured: "in memory only: lost when its process dies",
  durable: "on local disk, fsynced",
  replicated: "survives the loss of its node",
  external: "survives the job",
  evicted: "bytes dropped; metrics and place in the lineage kept",
  lost: "bytes were in the memory of a process that died",
};
