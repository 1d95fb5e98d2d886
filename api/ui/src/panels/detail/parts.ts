/** The parts of a state of several ranks, as rows. Pure. */
import { byRank, rankOf, withoutRanks } from "../../lib/ranks";
import type { Replica, StateDetail } from "../../lib/types";

export interface Row {
  rank: number;
  /** What the rank captured; null if it did not report it. */
  bytes: number | null;
  run: string | null;
  replicas: Replica[];
}

export interface Place {
  tier: string;
  node: string;
  status: string;
  ranks: number[];
  bytes: number;
}

/** Every rank of the state, with what it reported and where that is. */
export function rowsOf(state: Pick<StateDetail, "world_size" | "parts" | "replicas">): Row[] {
  const told = new Map((state.parts ?? []).map((part) => [part.rank, part]));
  const rows = Array.from({ length: state.world_size }, (_, rank) => ({ rank, bytes: told.get(rank)?.bytes_total ?? null, run: told.get(rank)?.run ?? null, replicas: [] as Replica[] }));
  for (const replica of state.replicas) rows[replica.rank]?.replicas.push(replica);
  return rows;
}

/** The metrics of a state, except those of single ranks. */
export const wholeMetrics = <T>(metrics: Readonly<Record<string, T>>): Record<string, T> => Object.fromEntries(withoutRanks(Object.keys(metrics)).map((key) => [key, metrics[key]!]));

export interface Measured {
  name: string;
  /** By rank; null is not a number. */
  values: ReadonlyMap<number, number | null>;
  least: number | null;
  greatest: number | null;
  mean: number | null;
}

/** The values that single ranks measured. */
export function measuredByRank(metrics: Readonly<Record<string, number | null>>): Measured[] {
  return [...byRank(Object.keys(metrics))].map(([name, keys]) => {
    const values = new Map(keys.map((key) => [Number(rankOf(key)), metrics[key] ?? null]));
    const numbers = [...values.values()].filter((value) => value !== null);
    if (!numbers.length) return { name, values, least: null, greatest: null, mean: null };
    const ordered = numbers.toSorted((one, other) => one - other);
    return { name, values, least: ordered[0]!, greatest: ordered.at(-1)!, mean: numbers.reduce((sum, value) => sum + value, 0) / numbers.length };
  });
}

/** The places of replicas, each once, with the ranks whose parts are there. */
export function placesOf(replicas: readonly Replica[]): Place[] {
  const found = new Map<string, Place>();
  for (const { tier, node, status, rank, bytes } of replicas) {
    const key = JSON.stringify([tier, node, status]);
    const place = found.get(key) ?? { tier, node, status, ranks: [], bytes: 0 };
    if (!place.ranks.includes(rank)) place.ranks.push(rank);
    place.bytes += bytes;
    found.set(key, place);
  }
  return [...found.values()];
}
