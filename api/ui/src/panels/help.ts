/** The content of the help. */
import { quoteKey } from "../lib/query";
import { byRelevance } from "../lib/relevance";
import type { Ref, Stats } from "../lib/types";

export const KEYS: readonly (readonly [readonly string[], string])[] = [
  [["/"], "filter"],
  [["j", "↓"], "next state"],
  [["k", "↑"], "previous state"],
  [["Home", "End"], "first and last state, also of what a filter found"],
  [["PgUp", "PgDn"], "a screenful up or down"],
  [["Enter"], "open the selected state"],
  [["g"], "go to a revision: a name, a uid, or a step back from one"],
  [["t"], "tag or branch the selected state"],
  [["m"], "mark for a diff"],
  [["d"], "diff with the marked state"],
  [["c"], "curves"],
  [["+", "−", "0"], "the graph larger, smaller, as usual; Ctrl and the wheel too"],
  [["Esc"], "close what is open"],
  [["?"], "this help"],
];

type Example = readonly [string, string];

/** Searches that find something in this repository: each uses names that are there. */
export function examplesOf(stats: Stats | null, refs: readonly Ref[]): Example[] {
  const metric = byRelevance((stats?.metrics ?? []).filter((one) => one.least !== null).map((one) => one.key))[0];
  const range = stats?.metrics.find((one) => one.key === metric);
  const field = metric === undefined ? "" : `metrics.${quoteKey(metric)}`;
  const least = range?.least ?? 0;
  const bound = Number((((range?.most ?? least) + least) / 2).toPrecision(4));
  const branch = (refs.find((ref) => ref.kind === "branch" && ref.name === "main") ?? refs.find((ref) => ref.kind === "branch"))?.name;
  const tag = refs.find((ref) => ref.kind === "tag")?.name;
  const key = stats?.config[0];
  const examples: (Example | false)[] = [
    field !== "" && [`${field} <= ${bound} and step > 0`, "two conditions; or, not and brackets work too"],
    field !== "" && [`order by ${field} limit 5`, "the five lowest"],
    field !== "" && [`${field} exists order by step desc`, "only where it was measured, the last step first"],
    branch !== undefined && [`branch = ${named(branch)}`, "on the path of a branch"],
    branch !== undefined && [`branch ~ ${JSON.stringify(branch.slice(0, 4))}${tag === undefined ? "" : ` or tag ~ ${JSON.stringify(tag.slice(0, 4))}`}`, "~ finds a part of a name"],
    tag !== undefined && [`descendant_of(${named(tag)})`, "all that came from a state"],
    branch !== undefined && [`ancestor_of(${named(branch)})`, "all that led to it"],
    ["created > now-1w", "s, m, h, d, w; or a date"],
    ["status in (captured, durable, external)", "where the bytes are"],
    key !== undefined && [`config.${quoteKey(key)} exists`, "by the configuration of the training"],
  ];
  return examples.filter((one) => one !== false);
}

/** Revisions of this repository. */
export const revisionsOf = (refs: readonly Ref[]): string => {
  const branch = refs.find((ref) => ref.kind === "branch")?.name ?? "main";
  return [`${branch}~1`, ...refs.filter((ref) => ref.kind === "tag").slice(0, 1).map((ref) => ref.name), ...refs.slice(0, 1).map((ref) => ref.state.slice(0, 6))].join(", ");
};

const named = (name: string): string => (/^[^\W\d][\w./-]*$/u.test(name) ? name : JSON.stringify(name));
