/** The colours of lines and points of branches, and their legend. Pure. */
import type { Tick } from "../../compare/axes";
import { legendOf, scaleOf, type Ink } from "../svg";

export interface Coloured {
  names: readonly string[];
  /** As `#rrggbb`. */
  colours: readonly string[];
  /** Which branches are chosen; the others are pale. */
  kept: readonly boolean[];
  /** What the colours are a scale of; null: each branch has its own colour. */
  scale: { title: string; marks: readonly Tick[] } | null;
}

export function coloursLegend({ names, colours, kept, scale }: Coloured, left: number, top: number, width: number, ink: Ink): { body: string; height: number } {
  if (scale) return scaleOf(scale.title, scale.marks, left, top, Math.min(320, width), ink);
  const keys = names.flatMap((title, line) => (kept[line] ? [{ title, colour: colours[line] ?? ink.edge, isArea: true }] : []));
  return legendOf(keys, left, top, width, ink, 40);
}
