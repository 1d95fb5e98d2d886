/** Keys: each action has a name, so that the help and the page mean the same. */

export type Act = "filter" | "goto" | "down" | "up" | "pageDown" | "pageUp" | "first" | "last" | "open" | "diff" | "mark" | "curves" | "ref" | "larger" | "smaller" | "usual" | "help" | "close";

const KEYS: Readonly<Record<string, Act>> = {
  "/": "filter", g: "goto", j: "down", k: "up", ArrowDown: "down", ArrowUp: "up", PageDown: "pageDown", PageUp: "pageUp",
  Home: "first", End: "last", Enter: "open", d: "diff", m: "mark", c: "curves", t: "ref", "+": "larger", "=": "larger", "-": "smaller", "0": "usual", "?": "help", Escape: "close",
};
const INSIDE_CONTROLS: readonly Act[] = ["close"];

/** The action of a key; null if the key belongs to a control, a dialog or the browser. */
export function actOf(event: KeyboardEvent): Act | null {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return null;
  const act = KEYS[event.key] ?? null;
  const at = event.target instanceof Element ? event.target : null;
  if (!act || at?.closest("dialog")) return null;
  if (at?.closest("input, textarea, select, [contenteditable]")) return INSIDE_CONTROLS.includes(act) ? act : null;
  if (event.key === "Enter" && at?.closest("button, a, summary")) return null;
  const isReading = at?.closest("[data-keys=own]") && event.key.length > 1 && act !== "close";
  return isReading ? null : act;
}
