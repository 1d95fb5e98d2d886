/** Which metrics people look at first, and whether they get better rising or falling, as everywhere (lineage/show/relevance.py and goals.py): the loss,
 validation metrics, then the rest by prefix. Both are tested with `relevance.test.json`. */

const CHECKED: Readonly<Record<string, number>> = { val: 0, valid: 0, validation: 0, eval: 0, dev: 0, test: 1 };

type Rank = readonly [number, number, string, number, string];

function rank(key: string): Rank {
  const words = (key.match(/[\p{L}\p{N}]+/gu) ?? [""]).map((word) => word.toLowerCase());
  const [first = "", last] = [words[0], words.at(-1)];
  const isChecked = first in CHECKED && words.length > 1;
  const group = words.length === 1 && first === "loss" ? 0 : isChecked ? 1 : last === "loss" ? 2 : 3;
  return [group, isChecked ? (CHECKED[first] ?? 0) : 0, first, Number(last !== "loss"), key];
}

/** Compares texts by code points, as Python does; JavaScript itself orders them by UTF-16. */
function order(one: number | string, other: number | string): number {
  if (typeof one === "number" || typeof other === "number") return Number(one) - Number(other);
  const [first, second] = [[...one], [...other]];
  const at = first.findIndex((letter, index) => letter !== second[index]);
  return at < 0 ? first.length - second.length : (first[at]!.codePointAt(0) ?? 0) - (second[at]?.codePointAt(0) ?? -1);
}

function compare(one: Rank, other: Rank): number {
  for (let index = 0; index < one.length; index++) {
    const found = order(one[index]!, other[index]!);
    if (found) return found;
  }
  return 0;
}

/** Keys in the order in which they are shown; `first` are those that a request named, in its order. */
export function byRelevance(keys: Iterable<string>, first: readonly string[] = []): string[] {
  const place = (key: string) => (first.includes(key) ? first.indexOf(key) : first.length);
  return [...new Set(keys)].sort((one, other) => place(one) - place(other) || compare(rank(one), rank(other)));
}

/** The `most` keys that get columns in a table; among equally relevant keys, those that most states have. */
export function relevantKeys(known: readonly { key: string; count: number }[], most: number): string[] {
  const ordered = [...known].sort((one, other) => rank(one.key)[0] - rank(other.key)[0] || other.count - one.count || compare(rank(one.key), rank(other.key)));
  return byRelevance(ordered.slice(0, most).map((one) => one.key));
}

/** The metric by which states are judged unless another is chosen: the most relevant one, as for branches. */
export const chiefMetric = (keys: readonly string[]): string | null => byRelevance(keys)[0] ?? null;

const FALLING = new Set("loss nll perplexity ppl error errors err mse rmse mae wer cer fid cost regret".split(" "));
const RISING = new Set("acc accuracy auc auroc f1 bleu rouge map miou iou dice precision recall reward return score r2 psnr ssim top1 top5 correct".split(" "));

/** Whether a metric gets better rising or falling, by the words of its name, as in the API (lineage/show/goals.py); the user may reverse it. */
export function guessAim(key: string): "min" | "max" {
  const words = [...(key.match(/[A-Z]?[a-z0-9]+|[A-Z0-9]+/g) ?? []), ...(key.toLowerCase().match(/[a-z0-9]+/g) ?? [])].map((word) => word.toLowerCase());
  return words.some((word) => RISING.has(word)) && !words.some((word) => FALLING.has(word)) ? "max" : "min";
}
