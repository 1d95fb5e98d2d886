/** Studies as in the API. A server of this version sends all of these fields. */
import type { components } from "../generated/openapi";

type Schemas = components["schemas"];

export type Study = Required<Schemas["Study"]>;
export type StudyVariant = Required<Schemas["StudyVariant"]>;
export type StudyDetail = Omit<Required<Schemas["StudyDetail"]>, "variants"> & { variants: StudyVariant[] };
export type Merge = Required<Schemas["Merge"]>;
export type Report = Required<Schemas["Report"]>;
export type ReportSample = Required<Schemas["ReportSample"]>;
export type ReportDetail = Omit<Required<Schemas["ReportDetail"]>, "samples"> & { samples: ReportSample[] };
