/** A question to the server and what came of it. The last answer stays while the next one is awaited. */
import { asProblem, type Problem } from "../lib/problem";

export class Asked<T> {
  value = $state.raw<T | null>(null);
  problem = $state.raw<Problem | null>(null);
  busy = $state(false);
  #running: AbortController | null = null;

  /** Ask; a question that is still open is given up. */
  async ask(question: (signal: AbortSignal) => Promise<T>): Promise<void> {
    this.#running?.abort();
    const running = (this.#running = new AbortController());
    this.busy = true;
    try {
      const value = await question(running.signal);
      if (this.#running !== running) return;
      this.value = value;
      this.problem = null;
    } catch (error) {
      if (this.#running !== running) return;
      this.problem = asProblem(error);
    }
    this.busy = false;
  }

  /** Give up what is open and forget what was answered. */
  forget(): void {
    this.#running?.abort();
    this.#running = null;
    this.value = this.problem = null;
    this.busy = false;
  }
}
