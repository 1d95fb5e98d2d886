/** What happens in the repository, as it happens: the event stream, reopened wherever it broke off. */
import { openEvents } from "./api";
import { asProblem } from "./problem";
import { backoff, EventReader } from "./stream";
import { onToken } from "./token.svelte";
import type { RefEvent } from "./types";

/** `locked`: the server answers, but requires a token. */
export type Light = "connecting" | "live" | "locked" | "off";
type Listener = (events: RefEvent[]) => void;

export const live = $state<{ light: Light; detail: string; last: RefEvent | null }>({ light: "connecting", detail: "", last: null });

const listeners = new Set<Listener>();
let ending: AbortController | null = null;

/** Calls `listener` with each batch of events; with an empty one when the stream was restarted and something may have been missed. Returns a function that
 stops it. */
export function onEvents(listener: Listener): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Follows the events of the chosen repository only. */
export function follow(): void {
  stop();
  ending = new AbortController();
  void run(ending.signal);
}

export function stop(): void {
  ending?.abort();
  ending = null;
}

async function run(signal: AbortSignal): Promise<void> {
  let lastId: string | null = null;
  for (let attempt = 0; !signal.aborted; attempt++) {
    live.light = "connecting";
    try {
      const response = await openEvents(lastId, signal);
      live.light = "live";
      live.detail = "";
      tell([]);
      attempt = 0;
      lastId = await readAll(response, lastId, signal);
    } catch (error) {
      if (signal.aborted) return;
      const problem = asProblem(error);
      live.detail = problem.detail;
      if (problem.status === 401 || problem.status === 403) {
        live.light = "locked";
        await newToken(signal);
        attempt = -1;
        continue;
      }
    }
    live.light = "off";
    await pause(backoff(attempt), signal);
  }
}

async function readAll(response: Response, lastId: string | null, signal: AbortSignal): Promise<string | null> {
  if (!response.body) return lastId;
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const reader = new EventReader();
  try {
    while (!signal.aborted) {
      const { done, value } = await pieces.read();
      if (done) break;
      const events = reader.read(value);
      lastId = events.findLast((event) => event.id !== null)?.id ?? lastId;
      const told = events.filter((event) => event.event === "ref").map((event) => JSON.parse(event.data) as RefEvent);
      if (told.length) tell(told);
    }
  } catch (error) {
    if (!signal.aborted) live.detail = asProblem(error).detail;
  }
  return lastId;
}

function tell(events: RefEvent[]): void {
  live.last = events.at(-1) ?? live.last;
  for (const listener of listeners) listener(events);
}

/** Waits until another token is given: the same one would be refused again. */
function newToken(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      stopListening();
      resolve();
    };
    const stopListening = onToken(end);
    signal.addEventListener("abort", end, { once: true });
  });
}

/** A pause that ends early when the machine is online again or the user returns to the page. */
function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      removeEventListener("online", end);
      document.removeEventListener("visibilitychange", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end);
    document.addEventListener("visibilitychange", end);
    signal.addEventListener("abort", end, { once: true });
  });
}
