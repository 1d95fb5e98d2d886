/** What is shown, in one place: read `view`, change it by `change`. The address always says the same. */
import { DEFAULTS, parseAddress, writeAddress, type Panel, type Scene, type Theme, type View } from "./address";

export type { Panel, Scene, Theme, View };
export type Dialog = "none" | "help" | "ref" | "goto";

export const view = $state<View>({ ...DEFAULTS });

/** Small windows over the page; not part of the address. The token's dialog has a store of its own. */
export const dialog = $state<{ open: Dialog }>({ open: "none" });

/** Show something else. `push` adds a step that "back" undoes; `replace` is for typing and moving. */
export function change(patch: Partial<View>, how: "push" | "replace" = "push"): void {
  Object.assign(view, patch);
  const address = location.pathname + writeAddress(view) + location.hash;
  if (address === location.pathname + location.search + location.hash) return;
  if (how === "push") history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  if ("columns" in patch && !("repository" in patch)) remember();
}

/** Select a state, and open what shows it: beside curves, where they are open. */
export function openState(uid: string): void {
  if (view.panel === "curves") change({ selected: uid, own: { ...view.own, "curves.beside": "1" } });
  else change({ selected: uid, panel: "detail" });
}

/** Close the innermost thing that is open: a dialog, then the panel. False when nothing was. */
export function close(): boolean {
  if (dialog.open !== "none") {
    dialog.open = "none";
    return true;
  }
  if (view.panel === "none") return false;
  const { "curves.full": isFull, ...own } = view.own;
  change(isFull && view.panel === "curves" ? { own } : { panel: "none" });
  return true;
}

/** Read the address, and go on reading it when the user goes back or forth. Called once. */
export function followAddress(): void {
  const read = () => Object.assign(view, parseAddress(location.search));
  read();
  addEventListener("popstate", read);
}

/** Choose a repository. The columns that its last visitor here had chosen come back, unless the address names others. */
export function enterRepository(name: string, how: "push" | "replace" = "push"): void {
  const isNew = view.repository !== "" && view.repository !== name;
  const kept = recall(name);
  const asked = isNew ? { ...DEFAULTS, theme: view.theme } : view;
  change({
    ...asked,
    repository: name,
    columns: asked.columns.length ? asked.columns : kept.columns,
  }, how);
}

interface Kept {
  columns: string[];
}

const keyOf = (name: string) => `datastates.view.${name}`;

function recall(name: string): Kept {
  const nothing = { columns: [] };
  try {
    return { ...nothing, ...(JSON.parse(localStorage.getItem(keyOf(name)) ?? "{}") as Partial<Kept>) };
  } catch {
    return nothing;
  }
}

function remember(): void {
  if (!view.repository) return;
  const kept: Kept = { columns: view.columns };
  try {
    localStorage.setItem(keyOf(view.repository), JSON.stringify(kept));
  } catch {
    // a browser that keeps nothing: the address still says it all
  }
}
