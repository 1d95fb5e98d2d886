/** Saving a state's tensors as a file. */
import { payloadAddress } from "../lib/api";
import { problemOf } from "../lib/problem";
import { token } from "../lib/token.svelte";

/** The address of the bytes: all tensors, or that of one path. */
export function fileAddress(uid: string, path: string | null): string {
  return payloadAddress(uid) + (path === null ? "" : `?only=${encodeURIComponent(literal(path))}`);
}

/** A pattern that matches only this path. */
export const literal = (path: string): string => path.replace(/[[*?]/g, "[$&]");

export const fileName = (uid: string, path: string | null): string =>
  path === null ? `${uid.slice(0, 12)}.safetensors` : `${uid.slice(0, 12)}.${path.replace(/[^\w.-]+/g, "_")}.safetensors`;

/** Fetches with the token, which a link cannot send, and saves: while it arrives if the browser can, else from memory. */
export async function save(uid: string, path: string | null): Promise<void> {
  const sink = await choose(fileName(uid, path));
  const headers: Record<string, string> = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  const response = await fetch(fileAddress(uid, path), { headers, credentials: "omit" });
  if (!response.ok) throw await problemOf(response);
  if (sink && response.body) return response.body.pipeTo(sink);
  saveBlob(await response.blob(), fileName(uid, path));
}

/** Saves what is in memory under a name. */
export function saveBlob(content: Blob, name: string): void {
  const address = URL.createObjectURL(content);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

type Picker = (options: { suggestedName: string }) => Promise<{ createWritable(): Promise<WritableStream<Uint8Array>> }>;

async function choose(name: string): Promise<WritableStream<Uint8Array> | null> {
  const picker = (window as unknown as { showSaveFilePicker?: Picker }).showSaveFilePicker;
  if (!picker || navigator.webdriver) return null;
  return (await picker.call(window, { suggestedName: name })).createWritable();
}
