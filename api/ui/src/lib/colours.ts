/** Colours of lanes and curves: by number, the same wherever they appear; each theme has its own set in app.css. */

export const COLOURS = 10;

/** The colour of a column of the graph. */
export const laneColour = (lane: number): string => `var(--lane-${lane % COLOURS})`;

/** The colour of the n-th curve. */
export const seriesColour = (index: number): string => laneColour(index);

/** What colours are in the present theme, such as `--text` or `--lane-3`: for a canvas, which knows no variables. */
export function readColours(names: readonly string[]): string[] {
  const probe = document.createElement("span");
  document.body.append(probe);
  const read = names.map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return read;
}

/** The colours of all lanes, for a canvas. */
export const readPalette = (): string[] => readColours(Array.from({ length: COLOURS }, (_, lane) => `--lane-${lane}`));
