/** The state for which the dialog for a new name is open. */
import type { RefKind } from "../../lib/types";
import { dialog } from "../../lib/view.svelte";

export const wanted = $state<{ kind: RefKind; uid: string | null }>({ kind: "tag", uid: null });

/** Opens the dialog that names a state. */
export function startRef(kind: RefKind, uid: string): void {
  Object.assign(wanted, { kind, uid });
  dialog.open = "ref";
}
