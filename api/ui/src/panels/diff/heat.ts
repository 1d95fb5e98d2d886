/** How much each layer changed, in its weights and in the optimizer's values for them: the tensors of a diff as a table. Pure. */
import { isScalar } from "./order";
import type { Change, TensorChange } from "./types";

/** One tensor, or those of a layer: `relative` is then their largest, and `path` is that tensor's. */
export interface HeatCell {
  path: string;
  count: number;
  change: Change;
  relative: number | null;
}

export interface HeatRow {
  name: string;
  cells: (HeatCell | null)[];
}

export interface Heat {
  kinds: string[];
  rows: HeatRow[];
  /** The ends of the scale: the least and the largest relative change; null where nothing was measured. */
  ends: [number, number] | null;
}

const SPAN = 1e6; // a change smaller than the largest by this factor has the first colour
const LEADING = ["weights", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"];

/** Rows are parameters in tree order, or their layers; columns are weights, then the optimizer's moments. Single numbers are left out. */
export function heatOf(tensors: readonly TensorChange[], byLayer: boolean): Heat {
  const counted = tensors.filter((one) => !isScalar(one) && one.change !== "unread");
  const owners = new Set(counted.map((one) => splitPath(one.path)).filter((at) => at.kind === "").map((at) => at.owner));
  const keepers = new Set(counted.map((one) => splitPath(one.path)).filter((at) => at.kind !== "").map((at) => at.owner));
  const found = new Map<string, Map<string, TensorChange[]>>();
  for (const one of counted) {
    const { owner, name, kind } = splitPath(one.path);
    const column = kind === "" ? (owners.size === 1 ? "weights" : owner) : keepers.size === 1 ? kind : `${owner} ${kind}`;
    const row = byLayer ? layerOf(name) : name;
    const cells = found.get(row) ?? found.set(row, new Map()).get(row)!;
    cells.set(column, [...(cells.get(column) ?? []), one]);
  }
  const kinds = [...new Set([...found.values()].flatMap((cells) => [...cells.keys()]))].sort((one, other) => rank(one) - rank(other) || one.localeCompare(other));
  const rows = [...found].map(([name, cells]) => ({ name, cells: kinds.map((kind) => cellOf(cells.get(kind))) }));
  return { kinds, rows, ends: endsOf(rows) };
}

/** `model/body.0.weight` and `optimizer/state/body.0.weight/exp_avg`: the owner, the parameter, and the role. */
export function splitPath(path: string): { owner: string; name: string; kind: string } {
  const parts = path.split("/");
  if (parts.length >= 4 && parts.at(-3) === "state") return { owner: parts.slice(0, -3).join("/"), name: parts.at(-2)!, kind: parts.at(-1)! };
  return { owner: parts[0]!, name: parts.slice(1).join("/") || path, kind: "" };
}

export const layerOf = (name: string): string => (name.includes(".") ? name.slice(0, name.lastIndexOf(".")) : name);

function rank(kind: string): number {
  const place = LEADING.findIndex((one) => kind === one || kind.endsWith(` ${one}`));
  return place < 0 ? LEADING.length : place;
}

function cellOf(tensors: TensorChange[] | undefined): HeatCell | null {
  if (!tensors) return null;
  const chief = tensors.reduce((most, one) => (weight(one) > weight(most) ? one : most));
  return { path: chief.path, count: tensors.length, change: chief.change, relative: chief.change === "same" ? 0 : chief.relative };
}

/** A change that cannot be measured, because the tensor came, went, was recast or was 0, matters more than any other. */
const weight = (one: TensorChange): number => (one.change === "same" ? -1 : (one.relative ?? Infinity));

function endsOf(rows: readonly HeatRow[]): [number, number] | null {
  const all = rows.flatMap((row) => row.cells).flatMap((cell) => (cell?.relative ? [cell.relative] : []));
  if (!all.length) return null;
  const most = Math.max(...all);
  return [Math.max(Math.min(...all), most / SPAN), most];
}

/** The position of a change on the scale, from 0 to 1: logarithmic, since changes differ by orders of magnitude. */
export function heatPlace(relative: number, [least, most]: readonly [number, number]): number {
  if (most <= least) return 1;
  return Math.max(0, Math.min(1, Math.log(relative / least) / Math.log(most / least)));
}

/** Values on the scale for its legend: its ends, and powers of ten between them. */
export function heatMarks([least, most]: readonly [number, number]): number[] {
  const inner: number[] = [];
  for (let power = Math.ceil(Math.log10(least)); power <= Math.floor(Math.log10(most)); power += 1) inner.push(10 ** power);
  return most > least ? [least, ...inner.filter((at) => at > least * 1.2 && at < most / 1.2), most] : [most];
}
