/** The text/event-stream format, read as it arrives. */

export interface StreamEvent {
  event: string;
  data: string;
  id: string | null;
}

/** Takes in pieces of text and returns complete events; an incomplete rest is kept. Comments are dropped. */
export class EventReader {
  #rest = "";

  read(text: string): StreamEvent[] {
    const blocks = (this.#rest + text).replaceAll("\r\n", "\n").split("\n\n");
    this.#rest = blocks.pop() ?? "";
    return blocks.map(eventOf).filter((event) => event !== null);
  }
}

function eventOf(block: string): StreamEvent | null {
  const found: StreamEvent = { event: "message", data: "", id: null };
  const data: string[] = [];
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") data.push(value);
    else if (name === "event") found.event = value;
    else if (name === "id") found.id = value;
  }
  return data.length ? { ...found, data: data.join("\n") } : null;
}

/** How long to wait before the next attempt, in ms: doubling, never above 15 s, randomised so that pages do not all return at once. */
export function backoff(attempt: number, random: () => number = Math.random): number {
  return Math.min(15_000, 500 * 2 ** attempt) * (0.5 + random() / 2);
}
