/** The commands that continue from a state. */

/** Python that continues training from it: on the branch whose head it is, else on a branch of its own. */
export function trackLine(uid: string, headOf: string | null): string {
  if (headOf !== null) return `run = repo.track(model=model, optimizer=optimizer, branch=${JSON.stringify(headOf)})`;
  return `run = repo.track(model=model, optimizer=optimizer, start="${uid}", branch="from-${uid.slice(0, 6)}")`;
}

export const loadLine = (uid: string): string => `tree = repo.load("${uid}")`;
export const restoreLine = (uid: string): string => `datastates restore ${uid} --into state.safetensors`;
