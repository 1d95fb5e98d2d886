/** One uPlot chart: the lines of a metric, bands around means, and marks where paths fork and where the selected state is. */
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { nearestPlace, type Aligned, type Y } from "./points";
import type { Seen } from "./span";

export interface Curve {
  colour: string;
  dash: number[];
  values: Y[];
  /** The line before smoothing; null if it is not smoothed. */
  faint: Y[] | null;
  band: { low: Y[]; high: Y[] } | null;
}

export interface Drawn {
  xs: number[];
  /** Lines that are drawn last are on top. */
  curves: Curve[];
  /** The points that can be picked. */
  points: Aligned;
  /** Places on the axis. */
  forks: number[];
  /** Places of values that are NaN or infinite. */
  gaps: readonly number[];
  selected: string | null;
  /** The visible part of the axis; null: all of it. */
  zoom: readonly [number, number] | null;
  ink: string;
  faint: string;
  accent: string;
  danger: string;
}

export interface Shape {
  width: number;
  height: number;
  isLog: boolean;
  isTime: boolean;
  /** The text of a place on the axis. */
  say: ((x: number) => string) | null;
}

export interface Asks {
  onplace: (place: number | null) => void;
  onpick: (uid: string) => void;
  onzoom: (zoom: [number, number] | null) => void;
  /** The curve that is pointed at. */
  onpoint: (curve: number | null) => void;
  /** The visible range of values between two places. */
  seen: (from: number, to: number) => Seen | null;
}

type Part = { curve: number; kind: "low" | "high" | "faint" | "line"; values: Y[] };

const OTHERS = 0.18;
const NEAR = 20; // pixels
const GAP = 14; // pixels: the height of the mark of a value that is NaN or infinite

/** All series of a chart in the order in which they are drawn: bands, then faint lines, then lines. */
export function partsOf(curves: readonly Curve[]): Part[] {
  const bands = curves.flatMap(({ band }, curve): Part[] => (band ? [{ curve, kind: "high", values: band.high }, { curve, kind: "low", values: band.low }] : []));
  const faints = curves.flatMap(({ faint }, curve): Part[] => (faint ? [{ curve, kind: "faint", values: faint }] : []));
  return [...bands, ...faints, ...curves.map((each, curve): Part => ({ curve, kind: "line", values: each.values }))];
}

export class Plot {
  #plot: uPlot;
  #drawn: Drawn;
  #parts: Part[];

  constructor(root: HTMLElement, drawn: Drawn, shape: Shape, readonly asks: Asks) {
    this.#drawn = drawn;
    this.#parts = partsOf(drawn.curves);
    this.#plot = new uPlot(this.#options(shape), this.#data(), root);
    this.#plot.over.addEventListener("click", (event) => this.#pick(event));
    this.#zoom();
  }

  /** Sets new numbers for the same lines. */
  draw(drawn: Drawn): void {
    this.#drawn = drawn;
    this.#parts = partsOf(drawn.curves);
    this.#plot.batch(() => {
      this.#plot.setData(this.#data(), drawn.zoom === null);
      this.#zoom();
    });
  }

  resize(width: number, height: number): void {
    this.#plot.setSize({ width, height });
  }

  /** Highlights one curve; null: none. */
  point(curve: number | null): void {
    const at = curve === null ? -1 : this.#parts.findIndex((part) => part.kind === "line" && part.curve === curve);
    this.#plot.setSeries(at < 0 ? null : at + 1, { focus: true });
  }

  destroy(): void {
    this.#plot.destroy();
  }

  #data(): uPlot.AlignedData {
    return [this.#drawn.xs, ...this.#parts.map((part) => part.values)] as uPlot.AlignedData;
  }

  #zoom(): void {
    const { zoom } = this.#drawn;
    if (zoom) this.#plot.setScale("x", { min: zoom[0], max: zoom[1] });
  }

  #options({ width, height, isLog, isTime, say }: Shape): uPlot.Options {
    const { ink, faint } = this.#drawn;
    const axis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 }, font: "11px system-ui, sans-serif" };
    const whole = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
    return {
      width,
      height,
      scales: { x: { time: isTime }, y: { ...(isLog ? { distr: 3 } : {}), range: (plot) => this.#range(plot) } },
      legend: { show: false },
      focus: { alpha: OTHERS },
      cursor: {
        sync: { key: "curves", setSeries: false, filters: { pub: isMove, sub: isMove } },
        focus: { prox: NEAR },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => (this.asks.onzoom(null), null) },
      },
      axes: [{ ...axis, size: 30, space: isTime || say ? 70 : 50, ...(isTime ? {} : say ? { values: (_, splits) => splits.map(say) } : { incrs: whole }) }, { ...axis, size: (_, values) => Math.max(46, ...(values ?? []).map((value) => 18 + 6.5 * (value ?? "").length)) }],
      series: [{}, ...this.#parts.map((part) => this.#series(part))],
      bands: this.#bands(),
      hooks: {
        draw: [(plot) => this.#marks(plot)],
        setCursor: [(plot) => this.asks.onplace(plot.cursor.idx ?? null)],
        setSelect: [(plot) => plot.select.width > 2 && this.#selected(plot)],
        setSeries: [(_, series) => this.asks.onpoint(series === null ? null : (this.#parts[series - 1]?.curve ?? null))],
      },
    };
  }

  #series({ curve, kind }: Part): uPlot.Series {
    const { colour, dash } = this.#drawn.curves[curve]!;
    if (kind === "low" || kind === "high") return { stroke: "transparent", width: 0, points: { show: false } };
    if (kind === "faint") return { stroke: clear(colour, 0.3), width: 1, points: { show: false } };
    return { stroke: colour, width: 1.75, dash, points: { size: 5 } };
  }

  #bands(): uPlot.Band[] {
    return this.#parts.flatMap(({ curve, kind }, index) => (kind === "high" ? [{ series: [index + 1, index + 2] as [number, number], fill: clear(this.#drawn.curves[curve]!.colour, 0.16) }] : []));
  }

  #range(plot: uPlot): [number | null, number | null] {
    const { min, max } = plot.scales["x"]!;
    const { xs } = this.#drawn;
    const from = min === null || min === undefined ? 0 : xs.findIndex((x) => x >= min);
    const to = max === null || max === undefined ? xs.length : xs.findLastIndex((x) => x <= max) + 1;
    const seen = from < 0 ? null : this.asks.seen(from, to);
    return seen ? [seen.low, seen.high] : [null, null];
  }

  #selected(plot: uPlot): void {
    const { left, width } = plot.select;
    const zoom: [number, number] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.asks.onzoom(zoom);
  }

  #marks(plot: uPlot): void {
    const { ctx } = plot;
    const { forks, gaps, selected, ink, accent, danger, points } = this.#drawn;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    for (const x of forks) stroke(plot, x, ink, [3, 4]);
    for (const x of gaps) stroke(plot, x, danger, [], 2, GAP);
    if (selected) {
      points.uids.forEach((uids, line) => {
        const place = uids.indexOf(selected);
        const value = points.values[line]?.[place];
        if (place < 0) return;
        stroke(plot, points.xs[place]!, accent, []);
        if (typeof value === "number") ring(plot, points.xs[place]!, value, accent);
      });
    }
    ctx.restore();
  }

  /** The state of the point nearest to a click: by height, at the place of the cursor. */
  #pick(event: MouseEvent): void {
    const { left, top } = this.#plot.cursor;
    if (left === undefined || top === undefined || left < 0 || event.detail > 1) return;
    const { xs, values, uids } = this.#drawn.points;
    const x = this.#plot.posToVal(left, "x");
    const after = xs.findIndex((each) => each >= x);
    const place = after < 0 ? xs.length - 1 : after > 0 && x - xs[after - 1]! < xs[after]! - x ? after - 1 : after;
    let best: { uid: string; away: number } | null = null;
    values.forEach((line, number) => {
      const at = nearestPlace(line, place);
      const uid = uids[number]?.[at];
      if (uid === undefined) return;
      const across = Math.abs(this.#plot.valToPos(xs[at]!, "x") - left);
      const away = Math.hypot(across, this.#plot.valToPos(line[at]!, "y") - top);
      if (!best || away < best.away) best = { uid, away };
    });
    if (best) this.asks.onpick((best as { uid: string }).uid);
  }
}

const isMove = (type: string) => type === "mousemove" || type === "mouseleave";

/** A colour as the browser reports it, `rgb(1, 2, 3)`, made partly transparent. */
const clear = (colour: string, share: number) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);

/** A line upwards from the axis: to the top, or `height` pixels high. */
function stroke(plot: uPlot, x: number, colour: string, dash: number[], width = 1, height = Infinity): void {
  const at = Math.round(plot.valToPos(x, "x", true));
  plot.ctx.strokeStyle = colour;
  plot.ctx.lineWidth = width * devicePixelRatio;
  plot.ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
  plot.ctx.beginPath();
  plot.ctx.moveTo(at, plot.bbox.top + Math.max(0, plot.bbox.height - height * devicePixelRatio));
  plot.ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
  plot.ctx.stroke();
}

function ring(plot: uPlot, x: number, value: number, colour: string): void {
  plot.ctx.setLineDash([]);
  plot.ctx.strokeStyle = colour;
  plot.ctx.lineWidth = 2.5 * devicePixelRatio;
  plot.ctx.beginPath();
  plot.ctx.arc(plot.valToPos(x, "x", true), plot.valToPos(value, "y", true), 6 * devicePixelRatio, 0, 2 * Math.PI);
  plot.ctx.stroke();
}
