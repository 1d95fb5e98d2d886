/** The lines and dots of a row of the graph: the server's lanes in pixels. */
import { isGone } from "../lib/format";
import type { GraphRow, State } from "../lib/types";
import { ROW } from "./scroll";

/** A line within a row. It begins and ends at the row's top (0), middle (0.5) or bottom (1), and belongs to a branch. */
export interface Line {
  from: number;
  to: number;
  begins: 0 | 0.5;
  ends: 0.5 | 1;
  /** The branch that it belongs to, by its key. */
  branch: number;
}

/** Every line of a row: those that pass, those that end at the state from its children, those that continue to its parents. */
export function linesOf(row: GraphRow): Line[] {
  const lines: Line[] = [];
  row.above.forEach((lane, index) => {
    const branch = row.above_branches[index] ?? NO_BRANCH;
    if (lane === row.lane) lines.push({ from: lane, to: lane, begins: 0, ends: 0.5, branch });
    else if (row.joins.includes(lane)) lines.push({ from: lane, to: row.lane, begins: 0, ends: 0.5, branch });
    else lines.push({ from: lane, to: lane, begins: 0, ends: 1, branch });
  });
  row.parents.forEach((lane, index) => {
    const branch = index === 0 ? row.branch : (row.below_branches[row.below.indexOf(lane)] ?? NO_BRANCH);
    lines.push({ from: row.lane, to: lane, begins: 0.5, ends: 1, branch });
  });
  return lines;
}

/** The branch of the line that passes a row in a column, or of the row itself; `NO_BRANCH` if there is none. */
export function branchAt(row: GraphRow, lane: number): number {
  if (row.lane === lane) return row.branch;
  const above = row.above.indexOf(lane);
  if (above >= 0) return row.above_branches[above] ?? NO_BRANCH;
  return row.below_branches[row.below.indexOf(lane)] ?? NO_BRANCH;
}

/** The key for lines and rows that no branch leads to. */
export const NO_BRANCH = -1;

/** How the lanes share a width: never closer than 4 pixels, nor wider apart than 14. */
export interface Spread {
  width: number;
  gap: number;
}

const MARGIN = 15;

export function spread(lanes: number, widest: number): Spread {
  const gap = Math.max(4, Math.min(14, (widest - 2 * MARGIN) / Math.max(1, lanes - 1)));
  return { gap, width: Math.ceil(Math.min(widest, Math.max(40, 2 * MARGIN + gap * (lanes - 1)))) };
}

export const xOf = (lane: number, { gap }: Spread): number => MARGIN + lane * gap;

/** The lane at a position in the graph; null beside all of them. */
export function laneAt(x: number, { gap }: Spread): number | null {
  const lane = Math.round((x - MARGIN) / gap);
  return lane >= 0 && Math.abs(x - MARGIN - lane * gap) <= Math.max(4, gap / 2) ? lane : null;
}

/** The theme's colours for drawing. */
export interface Paint {
  /** The colour of a branch by its key. */
  of: (branch: number) => string;
  ground: string;
  text: string;
  accent: string;
  muted: string;
}

export interface Dot {
  state: State;
  lane: number;
  colour: string;
  /** How many states the row stands for. */
  count: number;
  isNamed: boolean;
  isSelected: boolean;
  isMarked: boolean;
}

const THIN = 1.75;
const THICK = 3;

/** The lines of many rows. Vertical ones, which are most, are drawn as rectangles: a hundred times cheaper than a path where no GPU draws. */
export class Strokes {
  readonly #upright = new Map<number, { x: number; y: number; height: number }[]>(); // by branch
  readonly #curves = new Map<number, Path2D>();

  /** Adds the lines of a row whose top is at `y`. */
  add(row: GraphRow, y: number, at: Spread): void {
    for (const line of linesOf(row)) {
      const [x0, x1] = [xOf(line.from, at), xOf(line.to, at)];
      const [y0, y1] = [y + line.begins * ROW, y + line.ends * ROW];
      if (x0 === x1) this.#addUpright(line.branch, x0, y0, y1);
      else this.#addCurve(line, x0, y0, x1, y1);
    }
  }

  /** Draws them all; the branch that is pointed at is wider. */
  draw(on: CanvasRenderingContext2D, paint: Paint, lit: number | null): void {
    for (const [branch, lines] of this.#upright) {
      on.fillStyle = paint.of(branch);
      const width = branch === lit ? THICK : THIN;
      for (const { x, y, height } of lines) on.fillRect(x - width / 2, y, width, height);
    }
    for (const [branch, path] of this.#curves) {
      on.strokeStyle = paint.of(branch);
      on.lineWidth = branch === lit ? THICK : THIN;
      on.stroke(path);
    }
  }

  /** A line that continues one from the row above extends that one. */
  #addUpright(branch: number, x: number, y0: number, y1: number): void {
    const lines = this.#upright.get(branch) ?? [];
    const last = lines.findLast((line) => line.x === x);
    if (last && last.y + last.height === y0) last.height = y1 - last.y;
    else lines.push({ x, y: y0, height: y1 - y0 });
    this.#upright.set(branch, lines);
  }

  #addCurve(line: Line, x0: number, y0: number, x1: number, y1: number): void {
    const path = this.#curves.get(line.branch) ?? new Path2D();
    path.moveTo(x0, y0);
    if (line.begins === 0) turn(path, x0, y1, x1, y1, Math.abs(x1 - x0));
    else turn(path, x1, y0, x1, y1, Math.abs(x1 - x0));
    this.#curves.set(line.branch, path);
  }
}

/** Goes on to the corner, around it, and to the end: a line leaves its lane at once and is level where it meets a state. */
function turn(on: Path2D, xCorner: number, yCorner: number, x: number, y: number, width: number): void {
  on.arcTo(xCorner, yCorner, x, y, Math.min(ROW / 2 - 4, width));
  on.lineTo(x, y);
}

/** Draws a state: full if its bytes are somewhere, hollow if they are gone; with a ring if a branch or a tag names it. */
export function drawDot(on: CanvasRenderingContext2D, dot: Dot, y: number, at: Spread, paint: Paint): void {
  const x = xOf(dot.lane, at);
  const middle = y + ROW / 2;
  const { colour } = dot;
  const gone = isGone(dot.state.status);
  const radius = Math.min(4.5, at.gap / 2 + 1.5);
  if (dot.count > 1) {
    stretch(on, x, middle, radius, colour, dot.isSelected ? paint.text : null, paint.ground);
    return;
  }
  if (dot.isNamed) circle(on, x, middle, radius + 3, paint.ground, null, 0);
  circle(on, x, middle, radius, gone ? paint.ground : colour, gone ? colour : null, 1.5);
  if (dot.state.status === "captured") circle(on, x, middle, radius - 2.5, paint.ground, null, 0);
  if (dot.isNamed) circle(on, x, middle, radius + 2.5, null, colour, 1.5);
  if (dot.isMarked) circle(on, x, middle, radius + 5, null, paint.accent, 2, [3, 2]);
  if (dot.isSelected) circle(on, x, middle, radius + 4.5, null, paint.text, 1.5);
}

/** Several states in one: a lozenge as wide as a dot but higher, which interrupts the line through it. */
function stretch(on: CanvasRenderingContext2D, x: number, middle: number, radius: number, colour: string, chosen: string | null, ground: string): void {
  on.fillStyle = ground;
  on.fillRect(x - radius - 1, middle - 9, 2 * radius + 2, 18);
  on.fillStyle = colour;
  for (const away of [-6, 0, 6]) circle(on, x, middle + away, Math.min(2, radius), colour, null, 0);
  if (chosen) circle(on, x, middle, 11, null, chosen, 1.5);
}

function circle(
  on: CanvasRenderingContext2D, x: number, y: number, radius: number, fill: string | null, stroke: string | null, width: number, dash: number[] = [],
): void {
  on.beginPath();
  on.arc(x, y, Math.max(0, radius), 0, 2 * Math.PI);
  if (fill) {
    on.fillStyle = fill;
    on.fill();
  }
  if (stroke) {
    on.strokeStyle = stroke;
    on.lineWidth = width;
    on.setLineDash(dash);
    on.stroke();
    on.setLineDash([]);
  }
}
