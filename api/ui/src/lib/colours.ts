/** Colours of lanes and curves: by number, the same wherever they appear; each theme has its own set in app.css. */

export const COLOURS = 10;

/** The colour of a column of the graph. */
export const laneColour = (lane: number): string => `var(--lane-${lane % COLOURS})`;

/** The colour of the n-th curve. */
export const seriesColour = (index: number): string => laneColour(index);

/** The colours themselves, for a canvas, which knows no variables. */
export function readPalette(element: Element): string[] {
  const style = getComputedStyle(element);
  return Array.from({ length: COLOURS }, (_, lane) => style.getPropertyValue(`--lane-${lane}`).trim());
}
