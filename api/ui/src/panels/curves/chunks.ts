/** How many curves are requested at once, and with how many points. Pure. */

const POINTS_AT_ONCE = 200_000; // the API's limit
const KEYS_AT_ONCE = 32; // the API's limit
const AT_ONCE = 16;
const AIM_MS = 800;
const GROWTH = 4;

/** Fewer points for each line where there are many lines: as many as can be seen. */
export const pointsOf = (heads: number): number => (heads <= 8 ? 1000 : heads <= 64 ? 500 : 250);

/** The metrics of one request after the other. */
export const keyChunks = (keys: readonly string[]): string[][] =>
  Array.from({ length: Math.ceil(keys.length / KEYS_AT_ONCE) }, (_, number) => keys.slice(number * KEYS_AT_ONCE, (number + 1) * KEYS_AT_ONCE));

/** The number of heads in one request. */
export const mostAtOnce = (points: number, keys: number): number => Math.max(1, Math.min(AT_ONCE, Math.floor(POINTS_AT_ONCE / (points * Math.max(1, Math.min(keys, KEYS_AT_ONCE))))));

/** The number of heads in the next request, after one that took so long: as many as take about `AIM_MS`, which is how often the user sees progress. */
export function nextSize(size: number, tookMs: number, most: number): number {
  const wanted = Math.min(size * GROWTH, Math.floor((size * AIM_MS) / Math.max(1, tookMs)));
  return Math.max(1, Math.min(wanted, most));
}
