/** The last filters of each repository, newest first. */

const MOST = 8;
const keyOf = (repository: string) => `datastates.filters.${repository}`;

export function recall(repository: string): string[] {
  try {
    const kept: unknown = JSON.parse(localStorage.getItem(keyOf(repository)) ?? "[]");
    return Array.isArray(kept) ? kept.filter((one) => typeof one === "string").slice(0, MOST) : [];
  } catch {
    return [];
  }
}

export function remember(repository: string, query: string): void {
  const kept = [query, ...recall(repository).filter((one) => one !== query)].slice(0, MOST);
  try {
    localStorage.setItem(keyOf(repository), JSON.stringify(kept));
  } catch {
    // the browser stores nothing
  }
}
