/** Which of the compared states have the best value of a metric. Pure. */
import type { ComparisonRow } from "../lib/types";

/** The positions of the best values; none if all are equal, or if nothing says which are better. */
export function bestOf(row: ComparisonRow): number[] {
  const numbers = row.values.filter((value) => typeof value === "number");
  if (!row.direction || !row.differs || numbers.length < 2) return [];
  const best = row.direction === "min" ? Math.min(...numbers) : Math.max(...numbers);
  return row.values.flatMap((value, place) => (value === best ? [place] : []));
}
