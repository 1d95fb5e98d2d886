/** The size of the rows of the graph; in the address, so that a link shows as much of it. */
import { inAddress, number } from "../lib/own.svelte";

export const LEVELS: readonly number[] = [0.4, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2];

export const zoom = inAddress("graph.zoom", number(1, LEVELS[0]!, LEVELS.at(-1)!));

/** The next level, larger or smaller; at the end, the last one again. */
export function nextLevel(now: number, by: 1 | -1): number {
  const further = by > 0 ? LEVELS.find((level) => level > now + 1e-6) : LEVELS.findLast((level) => level < now - 1e-6);
  return further ?? now;
}
