/** The commands that continue from a state. They run as they are pasted, on the server's machine. */
import type { RepositoryInfo } from "../lib/types";

type Place = Pick<RepositoryInfo, "name" | "location" | "packs">;

/** A text as Python and as a shell write it. */
const python = (text: string): string => JSON.stringify(text);
const shell = (text: string): string => (/^[\w./@%+=:,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** Python that opens the repository. A token that only reads is not told where it is. */
function openLines({ name, location, packs }: Place): string {
  if (!location) return `import datastates\n\nrepo = datastates.open("PATH")  # of the repository ${name}\n`;
  return `import datastates\n\nrepo = datastates.open(${python(location)}${packs ? `, packs=${python(packs)}` : ""})\n`;
}

/** Python that continues training from it: on the branch whose head it is, else on a branch of its own. */
export function trackLine(place: Place, uid: string, headOf: string | null): string {
  const where = headOf !== null ? `branch=${python(headOf)}` : `start="${uid}", branch="from-${uid.slice(0, 6)}"`;
  return `${openLines(place)}run = repo.track(model=model, optimizer=optimizer, ${where})`;
}

/** Python that loads what a revision names. */
export function loadLine(place: Place, rev: string): string {
  if (place.location && !place.packs) return `import datastates\n\ntree = datastates.load(${python(`${place.location}/${rev}`)})`;
  return `${openLines(place)}tree = repo.load(${python(rev)})`;
}

export const restoreLine = ({ location }: Place, uid: string): string => `datastates restore ${uid} --into state.safetensors --repo ${location ? shell(location) : "PATH"}`;
