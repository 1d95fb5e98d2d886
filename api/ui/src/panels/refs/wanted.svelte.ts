/** What the dialog for a new name is about. */
import type { RefKind } from "../../lib/types";
import { dialog } from "../../lib/view.svelte";

export const wanted = $state<{ kind: RefKind; uid: string | null }>({ kind: "tag", uid: null });

/** Open the dialog that names a state. */
export function startRef(kind: RefKind, uid: string): void {
  Object.assign(wanted, { kind, uid });
  dialog.open = "ref";
}
