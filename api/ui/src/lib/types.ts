/** The types of the API, by the names of the table. Their shapes are those of its OpenAPI document: `scripts/ui check` generates them. */
import type { components } from "../generated/openapi";

type Schemas = components["schemas"];

export type Value = string | number | boolean | null;
export type Page<T> = { items: T[]; next: string | null };

export type Branch = Required<Schemas["Branch"]>;
export type Branches = Omit<Required<Schemas["Branches"]>, "items"> & { items: Branch[] };
export type Comparison = Required<Schemas["Comparison"]>;
export type ComparisonRow = Schemas["ComparisonRow"];
export type Histogram = Required<Schemas["Histogram"]>;
export type Parallels = Required<Schemas["Parallels"]>;
export type Edge = Schemas["Edge"];
export type FileInfo = Schemas["FileInfo"];
export type Fork = Schemas["Fork"];
/** A server of this version sends all of these fields. */
export type GraphRow = Required<Schemas["GraphRow"]>;
export type GraphPage = Omit<Required<Schemas["GraphPage"]>, "rows"> & { rows: GraphRow[] };
export type Overview = Schemas["Overview"];
export type Span = Schemas["Span"];
export type KeyStats = Schemas["KeyStats"];
export type NewRef = Schemas["NewRef"];
export type Note = Required<Schemas["Note"]>;
export type Ref = Schemas["Ref"];
export type RefEvent = Schemas["RefEvent"];
export type RefKind = Schemas["RefKind"];
export type Replica = Schemas["Replica"];
export type RepositoryInfo = Schemas["RepositoryInfo"];
export type Run = Schemas["Run"];
export type Series = Schemas["Series"];
export type SeriesLine = Schemas["SeriesLine"];
export type State = Schemas["State"];
export type StateDetail = Schemas["StateDetail"];
export type Stats = Schemas["Stats"];
export type Status = Schemas["Status"];
export type StoredPack = Schemas["StoredPack"];
export type TensorInfo = Schemas["TensorInfo"];
