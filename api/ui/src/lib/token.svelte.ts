/** The token that says what the user may do. Kept for the tab only; taken from the address's fragment, which browsers never send. */

const KEY = "datastates.token";

/** `asked` is why a token is wanted now, null when none is; the token dialog shows itself by it and calls `giveToken`. */
export const token = $state<{ value: string | null; asked: string | null }>({ value: null, asked: null });

let waiting: { promise: Promise<boolean>; resolve: (given: boolean) => void } | null = null;

/** Take `#token=…` out of the address, else what the tab has kept. Called once, before the first request. */
export function findToken(): void {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(history.state, "", location.pathname + location.search);
  }
  token.value = given ?? sessionStorage.getItem(KEY);
}

/** Ask the user for a token; true once one was given, false when the dialog was closed. Those who ask meanwhile wait for the same answer. */
export function askToken(why: string): Promise<boolean> {
  if (!waiting) {
    let resolve: (given: boolean) => void = () => {};
    const promise = new Promise<boolean>((settle) => (resolve = settle));
    waiting = { promise, resolve };
    token.asked = why;
  }
  return waiting.promise;
}

const listeners = new Set<() => void>();

/** Call `listener` whenever a token is given. Returns how to stop. */
export function onToken(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** What the dialog was answered with; null when it was closed without a token. */
export function giveToken(value: string | null): void {
  if (value !== null) {
    token.value = value;
    sessionStorage.setItem(KEY, value);
    for (const listener of [...listeners]) listener();
  }
  token.asked = null;
  waiting?.resolve(value !== null);
  waiting = null;
}

/** Forget the token, here and in the tab. */
export function dropToken(): void {
  token.value = null;
  sessionStorage.removeItem(KEY);
}
