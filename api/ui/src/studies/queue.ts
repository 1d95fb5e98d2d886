/** Runs network requests a few at a time, so that a gallery leaves room for what the user clicks. */

const AT_ONCE = 3;
const waiting: (() => Promise<void>)[] = [];
let running = 0;

/** Runs it soon; it must not throw. */
export function soon(work: () => Promise<void>): void {
  waiting.push(work);
  next();
}

function next(): void {
  while (running < AT_ONCE) {
    const work = waiting.shift();
    if (!work) return;
    running += 1;
    void work().finally(() => {
      running -= 1;
      next();
    });
  }
}
