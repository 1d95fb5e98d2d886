/** The sizes of panels, in pixels; stored in this browser and not in the address, since screens differ. */

const KEY = "datastates.sizes";

const sizes = $state<Record<string, number>>(recall());

/** Undefined: the default size. */
export const sizeOf = (panel: string): number | undefined => sizes[panel];

/** `size` null: the default size. */
export function resized(panel: string, size: number | null): void {
  if (size === null) delete sizes[panel];
  else sizes[panel] = size;
  try {
    localStorage.setItem(KEY, JSON.stringify(sizes));
  } catch {
    // the browser stores nothing: the sizes last as long as the page
  }
}

function recall(): Record<string, number> {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "{}") as Record<string, unknown>;
    return Object.fromEntries(Object.entries(kept).filter((pair): pair is [string, number] => typeof pair[1] === "number" && pair[1] > 0));
  } catch {
    return {};
  }
}
