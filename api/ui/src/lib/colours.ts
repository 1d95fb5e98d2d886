/** Colours: that of a branch depends on its name alone, so it is the same wherever it appears, in the terminal and in reports too. Each theme has its own set
 in app.css. */

export const COLOURS = 10;
const TRUNK = "main";

/** The place of a branch's colour in the palette: 0 for `main`, else 1 to 9 by 32-bit FNV-1a over the name in UTF-8 (docs/design/011-page.md). */
export function colourNumber(branch: string): number {
  if (branch === TRUNK) return 0;
  let digest = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(branch)) digest = Math.imul(digest ^ byte, 0x01000193) >>> 0;
  return 1 + (digest % (COLOURS - 1));
}

/** The colour of a branch, or of anything else with a name. */
export const branchColour = (branch: string): string => `var(--lane-${colourNumber(branch)})`;

/** The values of colours in the present theme, such as `--text` or `--lane-3`, for a canvas, which knows no variables. */
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

/** The colours of the palette, for a canvas. */
export const readPalette = (): string[] => readColours(Array.from({ length: COLOURS }, (_, number) => `--lane-${number}`));
