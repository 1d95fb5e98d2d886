/** What went wrong, as the API reports it (application/problem+json). */
export class Problem extends Error {
  readonly status: number;
  readonly kind: string;
  readonly title: string;
  readonly detail: string;
  /** The position in the text that was sent, counted from 1; only for a text that does not parse. */
  readonly column: number | null;
  readonly expected: readonly string[];
  /** The uid of the nearest ancestor that can be restored. */
  readonly nearest: string | null;

  constructor(body: { status?: number; kind?: string; title?: string; detail?: string; column?: number | null; expected?: readonly string[]; nearest?: string | null }) {
    super(body.detail ?? body.title ?? "the request failed");
    this.name = "Problem";
    this.status = body.status ?? 0;
    this.kind = body.kind ?? "error";
    this.title = body.title ?? "Error";
    this.detail = body.detail ?? this.title;
    this.column = body.column ?? null;
    this.expected = body.expected ?? [];
    this.nearest = body.nearest ?? null;
  }
}

/** Any failure as a Problem, so that one component can show it. A server that does not answer is `unavailable`. */
export function asProblem(error: unknown): Problem {
  if (error instanceof Problem) return error;
  if (error instanceof TypeError) {
    return new Problem({ kind: "unavailable", title: "No answer", detail: "the server does not answer: is datastates serve still running?" });
  }
  return new Problem({ title: "Unexpected", detail: error instanceof Error ? error.message : String(error) });
}

/** Whether the same request may succeed later: the server was away, or too busy. */
export const isPassing = (problem: Problem): boolean => problem.status === 0 || problem.status >= 500 || problem.status === 429 || problem.status === 401;

/** The problem in an answer; a proxy's HTML page counts by its status alone. */
export async function problemOf(response: Response): Promise<Problem> {
  const text = await response.text();
  try {
    return new Problem({ status: response.status, ...(JSON.parse(text) as object) });
  } catch {
    return new Problem({ status: response.status, title: response.statusText, detail: `the server answered ${response.status} ${response.statusText}` });
  }
}
