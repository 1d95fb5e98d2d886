/** Which metrics people look at first, as the terminal has it (lineage/show/relevance.py): the loss, what was validated, then the rest by prefix. */

const CHECKED: Readonly<Record<string, number>> = { val: 0, valid: 0, validation: 0, eval: 0, dev: 0, test: 1 };

type Rank = readonly [number, number, string, number, string];

function rank(key: string): Rank {
  const words = key.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [""];
  const [first = "", last] = [words[0], words.at(-1)];
  const isChecked = first in CHECKED && words.length > 1;
  const group = words.length === 1 && first === "loss" ? 0 : isChecked ? 1 : last === "loss" ? 2 : 3;
  return [group, isChecked ? (CHECKED[first] ?? 0) : 0, first, Number(last !== "loss"), key];
}

function compare(one: Rank, other: Rank): number {
  for (let index = 0; index < one.length; index++) {
    if (one[index]! < other[index]!) return -1;
    if (one[index]! > other[index]!) return 1;
  }
  return 0;
}

/** Keys in the order in which they are shown; `first` are those that a question was about, in its order. */
export function byRelevance(keys: Iterable<string>, first: readonly string[] = []): string[] {
  const place = (key: string) => (first.includes(key) ? first.indexOf(key) : first.length);
  return [...new Set(keys)].sort((one, other) => place(one) - place(other) || compare(rank(one), rank(other)));
}

/** The `most` keys that a table has columns for: of keys that matter as much, those that most states have. */
export function relevantKeys(known: readonly { key: string; count: number }[], most: number): string[] {
  const ordered = [...known].sort((one, other) => rank(one.key)[0] - rank(other.key)[0] || other.count - one.count || compare(rank(one.key), rank(other.key)));
  return byRelevance(ordered.slice(0, most).map((one) => one.key));
}

/** The metric by which branches are judged unless another is chosen: what was validated before the loss itself, as it says more. */
export function chiefMetric(keys: readonly string[]): string | null {
  const ordered = byRelevance(keys);
  return ordered.find((key) => rank(key)[0] === 1) ?? ordered[0] ?? null;
}

/** Whether more is better, by the usual names; the user may turn it round. */
export const guessAim = (key: string): "min" | "max" => (/acc|auc|f1|score|bleu|rouge|precision|recall|reward|psnr|ssim|iou|r2/i.test(key) ? "max" : "min");
