/** What can be saved of what is shown. Whatever shows a table or a figure offers it while it is there; the menu in the bar lists the offers. */
import { untrack } from "svelte";
import type { Sheet } from "./csv";

/** How a long export goes on, and whether somebody gave it up. */
export interface Work {
  signal: AbortSignal;
  /** So many are here, of so many; null: nobody knows yet. */
  say: (done: number, total: number | null) => void;
}

export interface Offer {
  /** As the menu says it: `Curves of loss`. */
  title: string;
  /** For the name of the file. */
  view: string;
  metric: string;
  /** Where it stands in the menu; what is of the view before what is of a panel. */
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

/** Offer these while the component that calls it is shown. What they give is read when somebody asks for it. */
export function offer(make: () => readonly Offer[]): void {
  $effect(() => {
    const own = make();
    untrack(() => (offers.items = [...offers.items, ...own].sort((one, other) => one.rank - other.rank || one.title.localeCompare(other.title))));
    return () => (offers.items = offers.items.filter((one) => !own.includes(one)));
  });
}
