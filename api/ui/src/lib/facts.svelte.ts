/** What is known of the server and of the chosen repository as a whole: repositories, refs, statistics. */
import { getRefs, getRepositories, getStates, getStats } from "./api";
import { onEvents } from "./live.svelte";
import { quoteKey } from "./query";
import { chiefMetric, guessAim } from "./relevance";
import type { Ref, RepositoryInfo, Stats } from "./types";
import { view } from "./view.svelte";

const REFRESH_MS = 2_000;

class Facts {
  repositories = $state.raw<RepositoryInfo[]>([]);
  refs = $state.raw<Ref[]>([]);
  stats = $state.raw<Stats | null>(null);
  /** The state with the best value of the metric that matters most. */
  best = $state.raw<{ uid: string; key: string; value: number } | null>(null);
  /** Branches and tags by the uid of the state that they name. */
  readonly refsByState = $derived(groupByState(this.refs));
  /** The chosen repository, as the server describes it. */
  readonly here = $derived(this.repositories.find((one) => one.name === view.repository) ?? { name: view.repository, uid: "", scope: "none" });
  /** What the token allows here: none, read, write or admin. */
  readonly scope = $derived(this.here.scope);

  /** Whether names and attributes may be changed here. */
  readonly mayWrite = $derived(this.scope === "write" || this.scope === "admin");

  refsOf(uid: string): readonly Ref[] {
    return this.refsByState.get(uid) ?? [];
  }

  async loadRepositories(): Promise<void> {
    this.repositories = (await getRepositories()).items;
  }

  /** Reads refs and statistics anew, as after a write. */
  async reload(): Promise<void> {
    const [refs, stats] = await Promise.all([getRefs(), getStats()]);
    this.refs = refs.items;
    this.stats = stats;
    this.best = await bestOf(stats);
  }
}

async function bestOf(stats: Stats): Promise<{ uid: string; key: string; value: number } | null> {
  const key = chiefMetric(stats.metrics.filter((one) => one.least !== null).map((one) => one.key));
  if (key === null) return null;
  const field = `metrics.${quoteKey(key)}`;
  const found = await getStates({ q: `order by ${field} ${guessAim(key) === "max" ? "desc" : "asc"} limit 1` });
  const value = found.items[0]?.metrics[key];
  return found.items[0] && typeof value === "number" ? { uid: found.items[0].uid, key, value } : null;
}

function groupByState(refs: readonly Ref[]): Map<string, Ref[]> {
  const grouped = new Map<string, Ref[]>();
  for (const ref of refs) grouped.set(ref.state, [...(grouped.get(ref.state) ?? []), ref]);
  return grouped;
}

export const facts = new Facts();

/** Keeps the facts up to date with the events, at most every two seconds. Returns a function that stops it. */
export function keepFacts(): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const stop = onEvents(() => {
    timer ??= setTimeout(() => {
      timer = undefined;
      facts.reload().catch(() => {}); // the light says that the server does not answer
    }, REFRESH_MS);
  });
  return () => {
    clearTimeout(timer);
    stop();
  };
}
