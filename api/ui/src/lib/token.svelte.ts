/** The token that says what the user may do. It is kept only for the tab, and taken from the address's fragment, which browsers never send. */

const KEY = "datastates.token";

/** `asked` says why a token is wanted now, null when none is; the token dialog opens by it and calls `giveToken`. */
export const token = $state<{ value: string | null; asked: string | null }>({ value: null, asked: null });

let waiting: { promise: Promise<boolean>; resolve: (given: boolean) => void } | null = null;

/** Takes `#token=…` out of the address, or else what the tab has stored. Called once, before the first request. */
export function findToken(): void {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(history.state, "", location.pathname + location.search);
  }
  token.value = given ?? sessionStorage.getItem(KEY);
}

/** Asks the user for a token; true once one was given, false when the dialog was closed. Concurrent callers wait for the same answer. */
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

/** Calls `listener` whenever a token is given. Returns a function that stops it. */
export function onToken(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The user's answer in the dialog; null when it was closed without a token. */
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

/** Forgets the token, here and in the tab. */
export function dropToken(): void {
  token.value = null;
  sessionStorage.removeItem(KEY);
}
