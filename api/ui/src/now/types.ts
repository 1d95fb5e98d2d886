/** What is going on and what is stored where, as in the API. A server of this version sends all of these fields. */
import type { components } from "../generated/openapi";

type Schemas = components["schemas"];

export type Training = Required<Schemas["TrainingInfo"]>;
export type Process = Omit<Required<Schemas["ProcessInfo"]>, "trainings"> & { trainings: Training[] };
export type Held = Required<Schemas["Held"]>;
export type Incomplete = Omit<Required<Schemas["Incomplete"]>, "waiting"> & { waiting: Required<Schemas["Waiting"]>[] };
export type Storage = Required<Schemas["Storage"]>;
export type Forecast = Required<Schemas["Forecast"]>;
export type Clone = Required<Schemas["CloneInfo"]>;
export type ServerInfo = Required<Schemas["ServerInfo"]>;
