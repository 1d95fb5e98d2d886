/** What the API says, by the words of the table; the shapes are the OpenAPI document's. */
export type Value = string | number | boolean | null;
export type Status = "captured" | "durable" | "replicated" | "external" | "evicted" | "lost";
export type RefKind = "branch" | "tag";
export type Page<T> = { items: T[]; next: string | null };

export interface Edge { parent: string; kind: "merge" | "soup" | "clone"; weight: number }
export interface Run {
  uid: string; host: string; user: string; pid: number; argv: string[]; git_commit: string | null; git_dirty: boolean | null;
  config: Record<string, Value>; versions: Record<string, string>; started_at: string; finished_at: string | null;
}
export interface State {
  uid: string; digest: string; step: number; micro_step: number; metrics: Record<string, number | null>; attributes: Record<string, Value>;
  message: string | null; created_at: string; status: Status; parents: string[]; edges: Edge[]; run: string | null; generation: number;
  bytes_total: number; bytes_new: number; world_size: number;
}
export interface Ref { name: string; kind: RefKind; state: string; version: number; message: string | null }
export interface RefEvent { id: number; name: string; kind: RefKind; old: string | null; new: string | null; reason: string; created_at: string }
export interface Replica { rank: number; tier: string; node: string; status: "ok" | "gone"; bytes: number; run: string | null }
export interface StoredPack { name: string; bytes: number }
export interface StateDetail extends State { refs: Ref[]; children: string[]; replicas: Replica[]; packs: StoredPack[]; run_record: Run | null }
export interface TensorInfo { path: string; dtype: string; shape: number[]; bytes: number; tied_to: string | null; norm: number | null }
export interface GraphRow { state: State; lane: number; above: number[]; below: number[]; joins: number[]; parents: number[] }
export interface GraphPage { heads: string[]; version: string; first: number; total: number; lanes: number; rows: GraphRow[] }
export interface SeriesLine { head: string; state: string; key: string; steps: number[]; values: (number | null)[]; uids: string[]; total: number }
export interface Fork { state: string; step: number; heads: string[] }
export interface Series { lines: SeriesLine[]; forks: Fork[] }
export interface KeyStats { key: string; count: number; least: number | null; most: number | null }
export interface Stats {
  states: number; statuses: Record<string, number>; branches: number; tags: number; runs: number; bytes_stored: number;
  metrics: KeyStats[]; attributes: string[]; config: string[]; newest: State | null;
}
export interface RepositoryInfo { name: string; uid: string; scope: "none" | "read" | "write" | "admin" }
