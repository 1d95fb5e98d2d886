/** Which branch a line of the graph belongs to. */
import type { GraphRow, Ref } from "../lib/types";

interface Seen {
  rowAt(index: number): GraphRow | undefined;
}

interface Named {
  refsOf(uid: string): readonly Ref[];
}

const FAR = 20_000;

/** The branch whose line passes row `index` in column `lane`: the first named state above on that line. Empty when that is not loaded. */
export function branchOf(index: number, lane: number, rows: Seen, names: Named): string {
  for (let above = index; above >= 0 && index - above < FAR; above--) {
    const row = rows.rowAt(above);
    if (!row) return "";
    if (row.lane === lane) {
      const named = names.refsOf(row.state.uid).filter((ref) => ref.kind === "branch");
      if (named.length) return named.map((ref) => ref.name).join(", ");
    }
    if (above !== index && row.lane !== lane && row.parents.includes(lane) && !row.above.includes(lane)) return "";
    if (!row.above.includes(lane) && !(row.lane === lane)) return "";
    if (row.lane === lane && !row.above.includes(lane)) return row.state.message ?? "";
  }
  return "";
}
