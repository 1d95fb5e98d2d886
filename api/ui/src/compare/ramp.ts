/** A scale of colours from `--ramp-0` to `--ramp-4`, which both themes have. Pure. */

const LAST = 4;

/** The colour of a value from 0 to 1; no value gets the colour of lines. */
export function rampColour(part: number | null): string {
  if (part === null || Number.isNaN(part)) return "var(--edge)";
  const at = Math.max(0, Math.min(1, part)) * LAST;
  const below = Math.min(LAST - 1, Math.floor(at));
  const above = Math.round((at - below) * 100);
  if (above === 0) return `var(--ramp-${below})`;
  if (above === 100) return `var(--ramp-${below + 1})`;
  return `color-mix(in oklab, var(--ramp-${below + 1}) ${above}%, var(--ramp-${below}))`;
}
