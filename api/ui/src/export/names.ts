/** The name of a saved file: from the repository, the view and the metric. Pure. */

const MOST = 60; // letters of each part

const safe = (part: string): string => part.replace(/[^\p{L}\p{N}._-]+/gu, "_").replace(/^[._]+|[._]+$/g, "").slice(0, MOST);

export const fileName = (repository: string, view: string, metric: string, kind: string): string =>
  `${[repository, view, metric].map(safe).filter(Boolean).join("-")}.${kind}`;
