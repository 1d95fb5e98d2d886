/** What the user looks at in a diff; kept in the address. */
import { inAddress, oneOf, text } from "../../lib/own.svelte";

/** The path of the tensor whose histogram is shown; empty: none. */
export const tensor = inAddress("diff.tensor", text(1000));
export const bins = inAddress("diff.bins", oneOf("linear", "log"));
export const counts = inAddress("diff.counts", oneOf("linear", "log"));
