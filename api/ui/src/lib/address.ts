/** The view as an address and back: the query says what is shown, so that a link shows it again. */

/** The branches, one row each; one of them, which is the first head; their graph, in which stretches of states are folded; every state; branches by settings and metrics; studies; what is running
 and stored where. */
export type Scene = "branches" | "branch" | "graph" | "states" | "compare" | "studies" | "now";
export type Panel = "none" | "detail" | "curves" | "diff";
export type Theme = "auto" | "light" | "dark";

export interface View {
  repository: string;
  scene: Scene;
  /** For the branches: their order, the metric that they are judged by, what they are grouped by. Empty: the server's default. */
  by: string;
  metric: string;
  group: string;
  /** Uids of states whose stretches the graph shows whole, and of those that have a row of their own in it. */
  opened: string[];
  alone: string[];
  /** Revisions whose history is shown; none: every branch and tag. */
  heads: string[];
  /** The filter, in the search grammar. */
  query: string;
  /** Ids of columns, in order; none: chosen by what the repository has. */
  columns: string[];
  /** The sort that a click on a header asked for: `metrics.loss desc`; empty: history, newest first. */
  sort: string;
  selected: string | null;
  /** The state that a diff compares with. */
  marked: string | null;
  panel: Panel;
  /** Metrics whose curves are drawn; none: the first that the repository has. */
  keys: string[];
  /** The study and the report on outliers that are shown; empty: the newest. */
  study: string;
  report: string;
  theme: Theme;
  /** What panels keep in the address for themselves, as written there: see `own.svelte.ts`. */
  own: Readonly<Record<string, string>>;
}

export const DEFAULTS: Readonly<View> = {
  repository: "", scene: "branches", by: "", metric: "", group: "", opened: [], alone: [], heads: [], query: "", columns: [], sort: "", selected: null, marked: null, panel: "none", keys: [], study: "", report: "", theme: "auto", own: {},
};

const PANELS: readonly string[] = ["none", "detail", "curves", "diff"];
const SCENES: readonly string[] = ["branches", "branch", "graph", "states", "compare", "studies", "now"];
/** Whether a scene is a table of states. */
export const isOfStates = (scene: Scene): boolean => scene === "graph" || scene === "states";
/** Whether a scene shows what the filter finds. */
export const hasFilter = (scene: Scene): boolean => isOfStates(scene) || scene === "branches" || scene === "compare";
/** The scene of an address that names none: a link to states dates from a time when there was nothing else to show. */
const sceneOf = (view: Omit<View, "scene">): Scene =>
  view.heads.length || view.query || view.sort || view.selected || view.marked || view.panel !== "none" ? "states" : DEFAULTS.scene;
const MOST = 16;
const THEMES: readonly string[] = ["auto", "light", "dark"];
/** The names that do not belong to a panel. */
export const CORE: readonly string[] = ["study", "report", "repo", "view", "by", "metric", "group", "open", "alone", "head", "q", "columns", "sort", "state", "mark", "panel", "key", "theme"];
const OWN = /^[a-z][a-z0-9.]{0,30}$/;
const OWN_MOST = 40;
const OWN_LENGTH = 2_000;

export const isOwn = (name: string): boolean => OWN.test(name) && !CORE.includes(name);

/** The decoded text; empty if it was cut short. */
export function decoded(said: string): string {
  try {
    return decodeURIComponent(said);
  } catch {
    return "";
  }
}

/** The view that an address's query asks for. Unknown or impossible values are left at their defaults. */
export function parseAddress(search: string): View {
  const said = new URLSearchParams(search);
  const one = (name: string) => said.get(name) ?? "";
  const isUid = (text: string) => /^[0-9a-f]{24}$/.test(text);
  const uid = (name: string) => (isUid(one(name)) ? one(name) : null);
  const view = {
    repository: one("repo"),
    by: /^-?[a-z]{1,20}$/.test(one("by")) ? one("by") : "",
    metric: one("metric"),
    group: one("group"),
    opened: said.getAll("open").filter(isUid).slice(-MOST),
    alone: said.getAll("alone").filter(isUid).slice(-MOST),
    heads: said.getAll("head").filter(Boolean),
    query: one("q"),
    columns: one("columns").split(",").map(decoded).filter(Boolean),
    sort: one("sort"),
    selected: uid("state"),
    marked: uid("mark"),
    panel: PANELS.includes(one("panel")) ? (one("panel") as Panel) : ("none" as Panel),
    keys: said.getAll("key").filter(Boolean),
    study: one("study"),
    report: /^[0-9]{1,9}$/.test(one("report")) ? one("report") : "",
    theme: THEMES.includes(one("theme")) ? (one("theme") as Theme) : ("auto" as Theme),
    own: Object.fromEntries([...said].filter(([name, value]) => isOwn(name) && value && value.length <= OWN_LENGTH).slice(0, OWN_MOST)),
  } satisfies Omit<View, "scene">;
  return { ...view, scene: SCENES.includes(one("view")) ? (one("view") as Scene) : sceneOf(view) };
}

/** The query of a view's address, without values that equal their defaults. */
export function writeAddress(view: View): string {
  const said = new URLSearchParams();
  const put = (name: string, value: string | null) => value && said.append(name, value);
  put("repo", view.repository);
  put("view", view.scene === sceneOf(view) ? null : view.scene);
  put("by", view.by);
  put("metric", view.metric);
  put("group", view.group);
  for (const uid of view.opened) put("open", uid);
  for (const uid of view.alone) put("alone", uid);
  for (const head of view.heads) put("head", head);
  put("q", view.query);
  put("columns", view.columns.map(encodeURIComponent).join(","));
  put("sort", view.sort);
  put("state", view.selected);
  put("mark", view.marked);
  put("panel", view.panel === "none" ? null : view.panel);
  for (const key of view.keys) put("key", key);
  put("study", view.study);
  put("report", view.report);
  put("theme", view.theme === "auto" ? null : view.theme);
  for (const name of Object.keys(view.own).sort()) put(name, view.own[name] ?? null);
  const text = said.toString();
  return text && `?${text}`;
}
