/** The texts in the rows of studies, and their order. Pure. */
import { formatCount } from "../lib/format";
import type { Study, StudyVariant } from "./types";

export const STAGE_MEANS: Readonly<Record<string, string>> = {
  done: "it has its result",
  running: "a process trains it now",
  begun: "nobody trains it now: the same call goes on with it",
  failed: "its last attempt raised an error",
  skipped: "a variant that it goes on from failed",
  waiting: "it has not begun",
};

export type Order = "tree" | "rank" | "took" | "bytes";
export const ORDERS: readonly (readonly [Order, string])[] = [
  ["tree", "as planned"], ["rank", "the best first"], ["took", "the longest first"], ["bytes", "the largest first"],
];

/** The variants in an order; those without a rank come last. The order of the API is that of the tree. */
export function inOrder(variants: readonly StudyVariant[], order: Order): readonly StudyVariant[] {
  if (order === "tree") return variants;
  const size = (one: StudyVariant) => (order === "rank" ? (one.rank ?? Infinity) : -(one[order === "took" ? "took_s" : "bytes"] ?? 0));
  return [...variants].sort((one, other) => (size(one) === size(other) ? 0 : size(one) - size(other)));
}

/** How many there are of each stage: `4 done, 1 failed`. */
export function countStages(variants: readonly StudyVariant[]): string {
  const counts = new Map<string, number>();
  for (const { stage } of variants) counts.set(stage, (counts.get(stage) ?? 0) + 1);
  return Object.keys(STAGE_MEANS).filter((stage) => counts.has(stage)).map((stage) => `${formatCount(counts.get(stage) ?? 0)} ${stage}`).join(", ");
}

/** A study in a list: `rates: 5 of 6 done`. */
export const studyTitle = (study: Study): string => `${study.name}: ${formatCount(study.done)} of ${formatCount(study.variants)} done${study.failed ? `, ${formatCount(study.failed)} failed` : ""}`;

export const percent = (share: number): string => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Epochs, and the part of the data that they were over: `2 / 3`, `1 / 1 · 80 %`. */
export function epochsText(one: StudyVariant): string {
  const epochs = one.epochs === null ? `${one.epoch ?? "–"}` : `${one.epoch ?? 0} / ${one.epochs}`;
  return one.samples !== null && one.samples_all ? `${epochs} · ${percent(one.samples / one.samples_all)}` : epochs;
}

/** The first line of an error, and what follows it. */
export function splitError(error: string): readonly [string, string] {
  const at = error.indexOf("\n");
  return at < 0 ? [error, ""] : [error.slice(0, at), error.slice(at).trim()];
}
