/** The answer of `/diff`, as `datastates diff --json` writes it. */
import type { State } from "../../lib/types";

export type Change = "same" | "changed" | "unread" | "recast" | "added" | "removed";

export interface TensorChange {
  path: string;
  change: Change;
  shape: number[];
  dtype: string;
  old_shape: number[] | null;
  old_dtype: string | null;
  old_norm: number | null;
  norm: number | null;
  distance: number | null;
  cosine: number | null;
  largest: number | null;
  at: number[] | null;
  fraction: number | null;
  relative: number | null;
}

/** The old and the new value; null where there is none. */
export type Pairs = Record<string, [unknown, unknown]>;

export interface DiffResult {
  old: State;
  new: State;
  base: State | null;
  tensors: TensorChange[];
  values: Pairs;
  metrics: Pairs;
  attributes: Pairs;
  config: Pairs;
  versions: Pairs;
  code: [unknown, unknown] | null;
  /** States whose bytes are not available, why, and the nearest that can be restored. */
  lacking: { state: string; why: string; nearest: State | null }[];
}
