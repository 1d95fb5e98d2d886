/** A request to the server and its result. The last answer stays while the next one is awaited. */
import { asProblem, type Problem } from "../lib/problem";

export class Asked<T> {
  value = $state.raw<T | null>(null);
  problem = $state.raw<Problem | null>(null);
  busy = $state(false);
  #running: AbortController | null = null;

  /** Sends a request; one that is still open is cancelled. */
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

  /** Cancels an open request, and forgets the answer. */
  forget(): void {
    this.#running?.abort();
    this.#running = null;
    this.value = this.problem = null;
    this.busy = false;
  }
}
