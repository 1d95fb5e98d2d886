/** A histogram as a drawing: steps over bins, on the scale of the bins. Pure. */

/** The outline of counts over edges; `x` and `y` map a value and a count to positions. Empty without bins. */
export function outline(edges: readonly number[], counts: readonly number[], x: (at: number) => number, y: (count: number) => number): string {
  if (!counts.length) return "";
  const steps = counts.map((count, bin) => `L${round(x(edges[bin]!))} ${round(y(count))}L${round(x(edges[bin + 1]!))} ${round(y(count))}`);
  return `M${round(x(edges[0]!))} ${round(y(0))}${steps.join("")}L${round(x(edges.at(-1)!))} ${round(y(0))}Z`;
}

const round = (value: number): string => value.toFixed(1);

/** The position of a value between the ends, from 0 to 1. */
export function along(edges: readonly number[], isLog: boolean): (at: number) => number {
  const on = (at: number) => (isLog ? Math.log(at) : at);
  const [low, high] = [on(edges[0] ?? 0), on(edges.at(-1) ?? 1)];
  return (at) => (high > low ? (on(at) - low) / (high - low) : 0.5);
}

/** The height of a count, from 0 to 1; on a logarithmic scale rare values can be seen. */
export function height(most: number, isLog: boolean): (count: number) => number {
  return (count) => (most <= 0 ? 0 : isLog ? Math.log1p(count) / Math.log1p(most) : count / most);
}
