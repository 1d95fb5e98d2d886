/** The values that a panel keeps in the address for itself: a link restores them, and going back undoes a change.

    const log = inAddress("curves.log", flag);
    log.value;          // reactive, wherever it is read
    log.set(true);      // the address follows; "push" adds a step that going back undoes

 Names are lower case, by panel: `curves.log`. The address leaves out a value that equals the default, and an impossible value is read as the default. */
import { decoded, isOwn } from "./address";
import { change, view } from "./view.svelte";

/** How a value is written in the address: `read` returns undefined for an impossible text, `write` returns an empty text for the default. */
export interface Kind<T> {
  default: T;
  read: (text: string) => T | undefined;
  write: (value: T) => string;
}

export interface Own<T> {
  readonly value: T;
  set: (value: T, how?: "push" | "replace") => void;
}

const taken = new Set<string>();

/** A key of the address; each name may be used once. */
export function inAddress<T>(name: string, kind: Kind<T>): Own<T> {
  if (!isOwn(name) || (taken.has(name) && !import.meta.hot)) throw new Error(`${name} cannot be a key of the address: it is taken, or not lower case`);
  taken.add(name);
  const written = (value: T) => (JSON.stringify(value) === JSON.stringify(kind.default) ? "" : kind.write(value));
  return {
    get value() {
      const text = view.own[name];
      return text === undefined ? kind.default : (kind.read(text) ?? kind.default);
    },
    set: (value, how = "replace") => {
      const { [name]: _, ...others } = view.own;
      const text = written(value);
      change({ own: text ? { ...others, [name]: text } : others }, how);
    },
  };
}

export const flag: Kind<boolean> = { default: false, read: (text) => (text === "1" ? true : undefined), write: (value) => (value ? "1" : "") };

export const text = (most = 200): Kind<string> => ({ default: "", read: (said) => said.slice(0, most), write: (value) => value });

export const oneOf = <T extends string>(first: T, ...others: T[]): Kind<T> => ({ default: first, read: (said) => [first, ...others].find((one) => one === said), write: (value) => value });

export const number = (usual: number, least: number, most: number): Kind<number> => ({
  default: usual,
  read: (said) => (said.trim() && Number(said) >= least && Number(said) <= most ? Number(said) : undefined),
  write: (value) => String(value),
});

/** Two numbers, or none: the zoom of a chart. */
export const range: Kind<readonly [number, number] | null> = {
  default: null,
  read: (said) => {
    const [from, to] = said.split("~").map(Number);
    return from !== undefined && to !== undefined && from < to ? [from, to] : undefined;
  },
  write: (value) => (value ? value.join("~") : ""),
};

export const list = (most = 50): Kind<readonly string[]> => ({
  default: [],
  read: (said) => said.split(",").slice(0, most).map(decoded).filter(Boolean),
  write: (value) => value.map(encodeURIComponent).join(","),
});
