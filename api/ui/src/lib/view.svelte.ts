/** What is shown, in one place: read `view`, change it with `change`. The address always says the same. */
import { DEFAULTS, parseAddress, writeAddress, type Panel, type Scene, type Theme, type View } from "./address";

export type { Panel, Scene, Theme, View };
export type Dialog = "none" | "help" | "ref" | "goto";

export const view = $state<View>({ ...DEFAULTS });

/** Small windows over the page, which are not part of the address. The token dialog has a store of its own. */
export const dialog = $state<{ open: Dialog }>({ open: "none" });

/** Shows something else. `push` adds a step that "back" undoes; `replace` is for typing and moving. */
export function change(patch: Partial<View>, how: "push" | "replace" = "push"): void {
  Object.assign(view, patch);
  const address = location.pathname + writeAddress(view) + location.hash;
  if (address === location.pathname + location.search + location.hash) return;
  if (how === "push") history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  if ("columns" in patch && !("repository" in patch)) remember();
}

/** Selects a state, and opens what shows it: beside the curves, if they are open. */
export function openState(uid: string): void {
  if (view.panel === "curves") change({ selected: uid, own: { ...view.own, "curves.beside": "1" } });
  else change({ selected: uid, panel: "detail" });
}

/** Opens the page of a branch. */
export function openBranch(name: string, metric = view.metric): void {
  change({ scene: "branch", heads: [name], metric, query: "", sort: "", selected: null, panel: "none" });
}

/** Closes the innermost open thing: a dialog, then the panel. False when nothing was open. */
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

/** Reads the address now, and again whenever the user goes back or forward. Called once. */
export function followAddress(): void {
  const read = () => Object.assign(view, parseAddress(location.search));
  read();
  addEventListener("popstate", read);
}

/** Chooses a repository. The columns that were last chosen for it in this browser come back, unless the address names others. */
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
    // the browser stores nothing: the address still has everything
  }
}
