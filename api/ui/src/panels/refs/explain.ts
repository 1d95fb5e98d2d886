/** What a refused change of a name means to the user who asked for it. */
import type { Problem } from "../../lib/problem";

export const RULES = "Letters, digits, - _ . and / between parts; no spaces, no ~ ^ @ : * ? or quotes, not what looks like a uid, at most 200 characters.";

/** A sentence for refusals that the page can explain better than the server, which knows nothing of the page. */
export function explain(problem: Problem): string | null {
  switch (problem.status) {
    case 401:
    case 403:
      return "This needs a token that may write.";
    case 409:
      return "That name is taken.";
    case 412:
      return "It moved meanwhile: look again.";
    case 404:
      return "It is gone: somebody deleted it, or the state.";
    case 400:
    case 422:
      return RULES;
    default:
      return null;
  }
}
