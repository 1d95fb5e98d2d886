/** The colours of the light theme, whatever the page shows: figures have a light ground. */
import { COLOURS } from "../lib/colours";
import "../compare/ramp.css";
import type { Ink } from "./svg";

/** CSS colours as `#rrggbb`, which every program that reads SVG knows. */
export function lightColours(colours: readonly string[]): string[] {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.colorScheme = "light";
  const dot = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const found = colours.map((colour) => {
    probe.style.color = colour;
    if (!dot) return "#000000";
    dot.fillStyle = getComputedStyle(probe).color;
    dot.fillRect(0, 0, 1, 1);
    return `#${[...dot.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((part) => part.toString(16).padStart(2, "0")).join("")}`;
  });
  probe.remove();
  return found;
}

export function lightInk(): Ink {
  const [text = "", muted = "", line = "", edge = "", accent = "", good = "", ...rest] = lightColours([
    ...["text", "muted", "line", "edge", "accent", "good"].map((name) => `var(--${name})`),
    ...Array.from({ length: COLOURS }, (_, number) => `var(--lane-${number})`),
    ...[0, 1, 2, 3, 4].map((number) => `var(--ramp-${number})`),
  ]);
  return { text, muted, line, edge, accent, good, lanes: rest.slice(0, COLOURS), ramp: rest.slice(COLOURS) };
}
