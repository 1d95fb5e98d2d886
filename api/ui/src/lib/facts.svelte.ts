/** What is known of the server and of the chosen repository as a whole: repositories, refs, statistics. */
import { getRefs, getRepositories, getStats } from "./api";
import { onEvents } from "./live.svelte";
import type { Ref, RepositoryInfo, Stats } from "./types";
import { view } from "./view.svelte";

const REFRESH_MS = 2_000;

class Facts {
  repositories = $state.raw<RepositoryInfo[]>([]);
  refs = $state.raw<Ref[]>([]);
  stats = $state.raw<Stats | null>(null);
  /** Branches and tags by the uid of the state that they name. */
  readonly refsByState = $derived(groupByState(this.refs));
  /** What the token allows here: none, read, write or admin. */
  readonly scope = $derived(this.repositories.find((one) => one.name === view.repository)?.scope ?? "none");

  refsOf(uid: string): readonly Ref[] {
    return this.refsByState.get(uid) ?? [];
  }

  async loadRepositories(): Promise<void> {
    this.repositories = (await getRepositories()).items;
  }

  /** Read refs and statistics anew, as after a write. */
  async reload(): Promise<void> {
    const [refs, stats] = await Promise.all([getRefs(), getStats()]);
    this.refs = refs.items;
    this.stats = stats;
  }
}

function groupByState(refs: readonly Ref[]): Map<string, Ref[]> {
  const grouped = new Map<string, Ref[]>();
  for (const ref of refs) grouped.set(ref.state, [...(grouped.get(ref.state) ?? []), ref]);
  return grouped;
}

export const facts = new Facts();

/** Keep the facts up to date with the events, at most every two seconds. Returns how to stop. */
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
