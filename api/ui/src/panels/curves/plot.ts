/** One uPlot chart: the lines of a metric over steps, with forks and the selected state marked. */
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { nearestPlace, type Aligned, type Y } from "./points";

export interface Drawn {
  aligned: Aligned;
  /** The lines again, smoothed; null when they are shown as they are. */
  smoothed: Y[][] | null;
  colours: string[];
  /** Steps. */
  forks: number[];
  selected: { uid: string; step: number } | null;
  ink: string;
  faint: string;
  accent: string;
}

export interface Asks {
  onplace: (place: number | null) => void;
  onpick: (uid: string) => void;
  onzoom: (isZoomed: boolean) => void;
}

export class Plot {
  #plot: uPlot;
  #drawn: Drawn;
  #isZoomed = false;

  constructor(
    root: HTMLElement,
    drawn: Drawn,
    shape: { width: number; height: number; log: boolean; group: string },
    readonly asks: Asks,
  ) {
    this.#drawn = drawn;
    this.#plot = new uPlot(this.#options(shape), data(drawn), root);
    this.#plot.over.addEventListener("click", (event) => this.#pick(event));
  }

  /** New numbers for the same lines. A zoom stays where it is. */
  draw(drawn: Drawn): void {
    this.#drawn = drawn;
    if (this.#isZoomed) {
      const { min, max } = this.#plot.scales["x"]!;
      this.#plot.setData(data(drawn), false);
      this.#plot.setScale("x", { min: min!, max: max! });
    } else this.#plot.setData(data(drawn));
  }

  resize(width: number, height: number): void {
    this.#plot.setSize({ width, height });
  }

  unzoom(): void {
    this.#isZoomed = false;
    this.#plot.setData(data(this.#drawn), true);
    this.asks.onzoom(false);
  }

  destroy(): void {
    this.#plot.destroy();
  }

  #options({ width, height, log, group }: { width: number; height: number; log: boolean; group: string }): uPlot.Options {
    const { ink, faint } = this.#drawn;
    const axis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 }, font: "11px system-ui, sans-serif" };
    return {
      width,
      height,
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      legend: { show: false },
      cursor: { sync: { key: group }, drag: { x: true, y: false }, points: { size: 7 } },
      axes: [{ ...axis, size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] }, { ...axis, size: 58 }],
      series: [{}, ...this.#series()],
      hooks: {
        draw: [(plot) => this.#marks(plot)],
        setCursor: [(plot) => this.asks.onplace(plot.cursor.idx ?? null)],
        setSelect: [(plot) => plot.select.width > 0 && this.#zoomed()],
      },
    };
  }

  #series(): uPlot.Series[] {
    const lines = this.#drawn.colours.map((stroke): uPlot.Series => ({ stroke, width: 1.75, points: { size: 5 } }));
    if (!this.#drawn.smoothed) return lines;
    return [...this.#drawn.colours.map((stroke): uPlot.Series => ({ stroke, width: 1, alpha: 0.3, points: { show: false } })), ...lines];
  }

  #zoomed(): void {
    this.#isZoomed = true;
    this.asks.onzoom(true);
  }

  #marks(plot: uPlot): void {
    const { ctx } = plot;
    const { forks, selected, ink, accent, aligned, smoothed } = this.#drawn;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    ctx.clip();
    for (const step of forks) stroke(plot, step, ink, [3, 4]);
    if (selected) {
      stroke(plot, selected.step, accent, []);
      aligned.uids.forEach((uids, line) => {
        const place = uids.indexOf(selected.uid);
        const value = (smoothed ?? aligned.values)[line]?.[place];
        if (typeof value === "number") ring(plot, selected.step, value, accent);
      });
    }
    ctx.restore();
  }

  /** The state of the point that is nearest to a click, by height at the place of the cursor. */
  #pick(event: MouseEvent): void {
    const place = this.#plot.cursor.idx;
    if (place === null || place === undefined || event.detail > 1) return;
    const { aligned, smoothed } = this.#drawn;
    const height = this.#plot.cursor.top ?? 0;
    let best: { uid: string; away: number } | null = null;
    (smoothed ?? aligned.values).forEach((values, line) => {
      const at = nearestPlace(values, place);
      const uid = aligned.uids[line]?.[at];
      if (at < 0 || !uid) return;
      const away = Math.abs(this.#plot.valToPos(values[at]!, "y") - height) + Math.abs(at - place) * 1e3;
      if (!best || away < best.away) best = { uid, away };
    });
    if (best) this.asks.onpick((best as { uid: string }).uid);
  }
}

function data({ aligned, smoothed }: Drawn): uPlot.AlignedData {
  return [aligned.steps, ...aligned.values, ...(smoothed ?? [])] as uPlot.AlignedData;
}

function stroke(plot: uPlot, step: number, colour: string, dash: number[]): void {
  const x = Math.round(plot.valToPos(step, "x", true));
  plot.ctx.strokeStyle = colour;
  plot.ctx.lineWidth = devicePixelRatio;
  plot.ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
  plot.ctx.beginPath();
  plot.ctx.moveTo(x, plot.bbox.top);
  plot.ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
  plot.ctx.stroke();
}

function ring(plot: uPlot, step: number, value: number, colour: string): void {
  plot.ctx.setLineDash([]);
  plot.ctx.strokeStyle = colour;
  plot.ctx.lineWidth = 2.5 * devicePixelRatio;
  plot.ctx.beginPath();
  plot.ctx.arc(plot.valToPos(step, "x", true), plot.valToPos(value, "y", true), 6 * devicePixelRatio, 0, 2 * Math.PI);
  plot.ctx.stroke();
}
