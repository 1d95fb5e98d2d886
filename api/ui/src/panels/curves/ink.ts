/** Colours of the theme as a canvas can use them: it knows neither variables nor `light-dark`. */
import { COLOURS } from "../../lib/colours";

export interface Ink {
  palette: string[];
  text: string;
  faint: string;
  accent: string;
  danger: string;
}

export function readInk(parent: HTMLElement): Ink {
  const probe = parent.appendChild(document.createElement("span"));
  probe.hidden = true;
  const colour = (variable: string) => {
    probe.style.color = `var(${variable})`;
    return getComputedStyle(probe).color;
  };
  const ink = {
    palette: Array.from({ length: COLOURS }, (_, lane) => colour(`--lane-${lane}`)),
    text: colour("--muted"),
    faint: colour("--line"),
    accent: colour("--accent"),
    danger: colour("--danger"),
  };
  probe.remove();
  return ink;
}
