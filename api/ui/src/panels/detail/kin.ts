/** Finds the branches that a state is on. */
import { getStates } from "../../lib/api";
import type { StateDetail } from "../../lib/types";

const ASKED = 40; // branches; more curves tell a reader nothing

/**
 * Those of the branches that have the state on their path. One request for each branch; a branch that disappears meanwhile is left out.
 * Among many branches it is the one to which the state belongs.
 */
export async function branchesWith(state: StateDetail, branches: readonly string[], signal: AbortSignal): Promise<string[]> {
  const own = state.origins[state.uid];
  if (branches.length > ASKED) return own !== undefined && branches.includes(own) ? [own] : [];
  const answers = await Promise.all(branches.map((branch) => getStates({ q: question(state.uid, branch), fields: "uid", limit: 1 }, signal).catch(() => null)));
  return branches.filter((_, index) => answers[index]?.items.length);
}

export function question(uid: string, branch: string): string {
  return `uid = "${uid}" and branch = ${JSON.stringify(branch)}`;
}
