/** Repeats a request when the repository changes, but not more often than a reader can follow. */
import { onEvents } from "../lib/live.svelte";

/** Calls `again` soon after events: the last one always counts, and calls are at least `pauseMs` apart. Returns a function that stops it. */
export function onFresh(again: () => void, pauseMs = 1000): () => void {
  let timer: ReturnType<typeof setTimeout> | null = null;
  let last = 0;
  const run = () => {
    timer = null;
    last = performance.now();
    again();
  };
  const stop = onEvents(() => {
    timer ??= setTimeout(run, Math.max(0, last + pauseMs - performance.now()));
  });
  return () => {
    stop();
    if (timer !== null) clearTimeout(timer);
  };
}
