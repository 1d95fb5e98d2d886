/** Finds the branches of the children of a fork. */
import { getStates } from "../../lib/api";
import type { Ref } from "../../lib/types";

const ASKED = 40; // branches; a page that asks for more tells a reader nothing

/** For each child, the branches that have it on their path. One request for each branch; a branch that disappears meanwhile is left out. */
export async function branchesOf(children: readonly string[], refs: readonly Ref[], signal: AbortSignal): Promise<Map<string, string[]>> {
  const branches = refs.filter((ref) => ref.kind === "branch").slice(0, ASKED);
  const found = new Map<string, string[]>();
  const answers = await Promise.all(
    branches.map((ref) => getStates({ q: question(children, ref.name), fields: "uid", limit: 100 }, signal).catch(() => null)),
  );
  answers.forEach((page, index) => {
    for (const { uid } of page?.items ?? []) found.set(uid, [...(found.get(uid) ?? []), branches[index]!.name]);
  });
  return found;
}

export function question(children: readonly string[], branch: string): string {
  const uids = children.slice(0, 100).map((uid) => `uid = "${uid}"`);
  return `(${uids.join(" or ")}) and branch = ${JSON.stringify(branch)}`;
}
