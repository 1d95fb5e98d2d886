/** What can be saved of what is shown. A component that shows a table or a figure offers it while it is there; the menu in the bar lists the offers. */
import { untrack } from "svelte";
import type { Sheet } from "./csv";

/** The progress of a long export, and whether the user cancelled it. */
export interface Work {
  signal: AbortSignal;
  /** The numbers done and in total; null: the total is not known yet. */
  say: (done: number, total: number | null) => void;
}

export interface Offer {
  /** The title in the menu: `Curves of loss`. */
  title: string;
  /** For the name of the file. */
  view: string;
  metric: string;
  /** Its position in the menu: offers of the view come before those of a panel. */
  rank: number;
  /** The whole table, not only what is loaded. */
  csv?: (work: Work) => Sheet | Promise<Sheet>;
  /** The figure, as text. */
  svg?: (work: Work) => string | Promise<string>;
}

class Offers {
  items = $state.raw<readonly Offer[]>([]);
}

export const offers = new Offers();

/** Offers these while the calling component is shown. Their content is read when the user asks for it. */
export function offer(make: () => readonly Offer[]): void {
  $effect(() => {
    const own = make();
    untrack(() => (offers.items = [...offers.items, ...own].sort((one, other) => one.rank - other.rank || one.title.localeCompare(other.title))));
    return () => (offers.items = offers.items.filter((one) => !own.includes(one)));
  });
}
