/** Figures as self-contained SVG: attributes only, fonts that every machine has, light ground. Pure. */

export type Attributes = Readonly<Record<string, string | number | null | undefined>>;

/** The colours of a figure, as `#rrggbb`. */
export interface Ink {
  text: string;
  muted: string;
  line: string;
  edge: string;
  accent: string;
  good: string;
  /** Of branches, by their number. */
  lanes: readonly string[];
  /** From little to much. */
  ramp: readonly string[];
}

export interface Figure {
  title: string;
  /** A line below the title: what was chosen, and of what. */
  note: string;
  width: number;
  height: number;
  body: string;
}

export const GROUND = "#ffffff";
const FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif";
const HEAD = 58;
const LETTER = 0.6; // of the font size: about the widest letter in any font that may show it
const BOLD = 0.7;

export const escaped = (text: string): string =>
  text.replace(/[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd").replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

export function element(name: string, attributes: Attributes, ...children: readonly string[]): string {
  const said = Object.entries(attributes).flatMap(([key, value]) => (value === null || value === undefined ? [] : [` ${key}="${escaped(typeof value === "number" ? round(value) : value)}"`]));
  return children.length ? `<${name}${said.join("")}>${children.join("")}</${name}>` : `<${name}${said.join("")}/>`;
}

export const text = (x: number, y: number, said: string, more: Attributes = {}): string => element("text", { x, y, "font-size": 11, ...more }, escaped(said));

export const line = (x1: number, y1: number, x2: number, y2: number, stroke: string, more: Attributes = {}): string => element("line", { x1, y1, x2, y2, stroke, ...more });

export const round = (value: number): string => String(Math.round(value * 100) / 100);

/** The approximate width of a text. */
export const widthOf = (said: string, size = 11, isBold = false): number => said.length * size * (isBold ? BOLD : LETTER);

/** A text, cut where there is no room. */
export function fitted(said: string, width: number, size = 11, isBold = false): string {
  const most = Math.max(1, Math.floor(width / widthOf(" ", size, isBold)));
  return said.length <= most ? said : `${said.slice(0, Math.max(1, most - 1))}…`;
}

/** A whole document: ground, title, and below them the body, whose y begins at 0. */
export function documentOf({ title, note, width, height, body }: Figure, ink: Ink): string {
  const tall = height + HEAD;
  const head = text(16, 27, fitted(title, width - 32, 16, true), { "font-size": 16, "font-weight": "bold", fill: ink.text }) + text(16, 45, fitted(note, width - 32), { fill: ink.muted });
  const all = element("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: tall, viewBox: `0 0 ${round(width)} ${round(tall)}`, "font-family": FONT, fill: ink.text },
    element("title", {}, escaped(title)), element("desc", {}, escaped(note)), element("rect", { width, height: tall, fill: GROUND }), head, element("g", { transform: `translate(0 ${HEAD})` }, body));
  return `<?xml version="1.0" encoding="UTF-8"?>\n${all}\n`;
}

export interface Key {
  title: string;
  colour: string;
  dash?: readonly number[];
  /** A square instead of a line. */
  isArea?: boolean;
}

const ROW = 19;
const SAMPLE = 26;

/** A legend below a drawing, in as many columns as fit, and its height. If there are too many keys it shows the first ones and how many more there are. */
export function legendOf(keys: readonly Key[], left: number, top: number, width: number, ink: Ink, most = 60): { body: string; height: number } {
  const shown = keys.slice(0, most);
  const column = Math.min(width, Math.max(110, SAMPLE + 18 + Math.max(0, ...shown.map((key) => widthOf(key.title)))));
  const columns = Math.max(1, Math.floor(width / column));
  const parts = shown.map((key, index) => {
    const [x, y] = [left + (index % columns) * column, top + Math.floor(index / columns) * ROW + 12];
    const sample = key.isArea
      ? element("rect", { x: x + 5, y: y - 9, width: 11, height: 11, rx: 2, fill: key.colour })
      : line(x, y - 4, x + 20, y - 4, key.colour, { "stroke-width": 2.5, "stroke-dasharray": key.dash?.length ? key.dash.join(" ") : null });
    return sample + text(x + SAMPLE, y, fitted(key.title, column - SAMPLE - 8), { fill: ink.text });
  });
  const rows = Math.ceil(shown.length / columns);
  if (keys.length > most) parts.push(text(left, top + rows * ROW + 12, `and ${keys.length - most} more`, { fill: ink.muted }));
  return { body: parts.join(""), height: (rows + (keys.length > most ? 1 : 0)) * ROW };
}

/** A strip of colours with the values at some places, and its height. */
export function scaleOf(title: string, marks: readonly { place: number; text: string }[], left: number, top: number, width: number, ink: Ink): { body: string; height: number } {
  const stops = ink.ramp.map((colour, index) => element("stop", { offset: index / (ink.ramp.length - 1), "stop-color": colour }));
  const parts = [
    element("defs", {}, element("linearGradient", { id: "scale" }, ...stops)),
    text(left, top + 11, fitted(title, width), { "font-weight": "bold" }),
    element("rect", { x: left, y: top + 18, width, height: 10, rx: 3, fill: "url(#scale)" }),
    ...marks.filter((mark, index) => index === 0 || index === marks.length - 1 || (mark.place > 0.22 && mark.place < 0.78)).map((mark) =>
      text(left + Math.max(0, Math.min(1, mark.place)) * width, top + 42, mark.text, { fill: ink.muted, "text-anchor": mark.place <= 0.02 ? "start" : mark.place >= 0.98 ? "end" : "middle" })),
  ];
  return { body: parts.join(""), height: 50 };
}
