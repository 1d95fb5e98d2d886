/** What the API is told of refs outside of bodies: names in addresses, and which ref or note is meant. */
import { Problem } from "./problem";
import type { Note, Ref } from "./types";

/** A name as part of an address, with its slashes. Browsers take `.` and `..` for steps, even escaped, and would ask for another name. */
export function inPath(name: string): string {
  const parts = name.split("/");
  if (parts.some((part) => part === "." || part === "..")) {
    throw new Problem({ status: 400, kind: "invalid-input", title: "No address", detail: `no address in a browser can hold ${name}: use the command line for it` });
  }
  return parts.map(encodeURIComponent).join("/");
}

/** The ETag of a note: the time of its last edit, or else of its creation, as a JSON string. */
export const etagOfNote = (note: Pick<Note, "edited_at" | "created_at">): string => JSON.stringify(note.edited_at ?? note.created_at);

/** The ETag of a ref, for `If-Match`: what it must still be to be changed. */
export const etagOf = (ref: Pick<Ref, "kind" | "version" | "state">): string => `"${ref.kind}-${ref.version}-${ref.state}"`;
