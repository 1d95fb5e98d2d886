/** Ranks of a job, and the metrics that a state has of each of them. Pure. */

/** Ascending ranks as people write them: `0-3, 7`. */
export function ranksText(ranks: readonly number[]): string {
  const spans: [number, number][] = [];
  for (const rank of ranks) {
    const last = spans.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(", ");
}

/** The keys by rank of each metric that ranks measured for themselves: `loss@0`, `loss@1`, … beside a `loss`. A metric that a user calls `acc@5`, where there
 is no `acc@0`, is not a rank's. */
export function byRank(keys: Iterable<string>): ReadonlyMap<string, readonly string[]> {
  const all = new Set(keys);
  const found = new Map<string, { rank: number; key: string }[]>();
  for (const key of all) {
    const said = /^(.+)@(0|[1-9]\d*)$/.exec(key);
    const name = said?.[1] ?? "";
    if (!said || !all.has(name) || !all.has(`${name}@0`)) continue;
    found.set(name, [...(found.get(name) ?? []), { rank: Number(said[2]), key }]);
  }
  const several = [...found].filter(([, members]) => members.length > 1);
  return new Map(several.map(([name, members]) => [name, members.sort((one, other) => one.rank - other.rank).map(({ key }) => key)]));
}

/** Keys without those of single ranks. */
export function withoutRanks(keys: Iterable<string>): string[] {
  const all = [...keys];
  const members = new Set([...byRank(all).values()].flat());
  return all.filter((key) => !members.has(key));
}

/** At most so many, evenly spaced; the first and the last are among them. */
export const evenly = <T>(all: readonly T[], most: number): T[] =>
  all.length <= most ? [...all] : Array.from({ length: most }, (_, number) => all[Math.round((number * (all.length - 1)) / (most - 1))]!);

/** The rank of such a key. */
export const rankOf = (key: string): string => key.slice(key.lastIndexOf("@") + 1);
