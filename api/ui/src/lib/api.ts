/** The API of the chosen repository, a function a route. Each throws `Problem`; a 401 asks for a token and tries again once. */
import { Problem, problemOf } from "./problem";
import { askToken, token } from "./token.svelte";
import type { GraphPage, Page, Ref, RefEvent, RefKind, RepositoryInfo, Run, Series, State, StateDetail, Stats, TensorInfo, Value } from "./types";
import { view } from "./view.svelte";

type Query = Record<string, string | number | boolean | null | undefined | readonly string[]>;
interface Options {
  method?: string;
  query?: Query;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
}

const ROOT = "api/v1"; // relative to the page, which a proxy may serve below a prefix

/** Every repository of the server. */
export const getRepositories = () => ask<Page<RepositoryInfo>>(`${ROOT}/repositories`);

export const resolve = (rev: string, signal?: AbortSignal) => get<State>("/resolve", { rev }, signal);
export const getStates = (query: { q?: string; after?: string | null; limit?: number; fields?: string }, signal?: AbortSignal) =>
  get<Page<State>>("/states", query, signal);
export const getState = (uid: string, signal?: AbortSignal) => get<StateDetail>(`/states/${uid}`, {}, signal);
export const getLog = (uid: string, query: { after?: string | null; limit?: number } = {}, signal?: AbortSignal) =>
  get<Page<State>>(`/states/${uid}/log`, query, signal);
export const getTensors = (uid: string, norms = false, signal?: AbortSignal) => get<Page<TensorInfo>>(`/states/${uid}/tensors`, { norms }, signal);
export const getGraph = (query: { heads?: readonly string[]; first?: number; count?: number; around?: string }, signal?: AbortSignal) =>
  get<GraphPage>("/graph", { head: query.heads, first: query.first, count: query.count, around: query.around }, signal);
export const getSeries = (query: { heads: readonly string[]; keys: readonly string[]; points?: number }, signal?: AbortSignal) =>
  get<Series>("/series", { head: query.heads, key: query.keys, points: query.points }, signal);
export const getStats = (signal?: AbortSignal) => get<Stats>("/stats", {}, signal);
export const getRun = (uid: string, signal?: AbortSignal) => get<Run>(`/runs/${uid}`, {}, signal);
export const getRef = (name: string, signal?: AbortSignal) => get<Ref>(`/refs/${pathOf(name)}`, {}, signal);
export const getReflog = (name: string, query: { after?: string | null; limit?: number } = {}, signal?: AbortSignal) =>
  get<Page<RefEvent>>(`/reflog/${pathOf(name)}`, query, signal);

/** Every branch and tag. */
export const getRefs = (signal?: AbortSignal) => get<Page<Ref>>("/refs", {}, signal);

/** Two states compared; without `tensors` only steps, metrics, values and code. */
export const getDiff = <T = unknown>(query: { old: string; new: string; only?: string; tensors?: boolean }, signal?: AbortSignal) =>
  get<T>("/diff", query, signal);

export const makeRef = (name: string, ref: { kind: RefKind; rev: string; message?: string | null }) => send<Ref>("PUT", `/refs/${pathOf(name)}`, ref);

/** Move a ref that stands at `version`; a Problem with status 412 says that it no longer does. */
export const moveRef = (name: string, version: number, rev: string) => send<Ref>("PATCH", `/refs/${pathOf(name)}`, { rev }, version);
export const deleteRef = (name: string, version: number) => send<null>("DELETE", `/refs/${pathOf(name)}`, undefined, version);

/** Set attributes; null takes one away. */
export const annotate = (uid: string, attributes: Record<string, Value>) => send<State>("PATCH", `/states/${uid}/attributes`, { attributes });

/** Where a state's tensors are fetched from as one safetensors file. A link cannot send a token: with one, use `download`. */
export const payloadAddress = (uid: string) => new URL(base() + `/states/${uid}/payload`, document.baseURI).href;

/** Save a state's tensors as a file, with the token. */
export async function download(uid: string): Promise<void> {
  const response = await answer(base() + `/states/${uid}/payload`, {});
  const address = URL.createObjectURL(await response.blob());
  const link = Object.assign(document.createElement("a"), { href: address, download: `${uid}.safetensors` });
  link.click();
  URL.revokeObjectURL(address);
}

/** The event stream, from after `lastId` on, or from now on. */
export const openEvents = (lastId: string | null, signal: AbortSignal): Promise<Response> =>
  answer(base() + "/events", { signal, headers: { Accept: "text/event-stream", ...(lastId ? { "Last-Event-ID": lastId } : {}) } });

const base = () => `${ROOT}/repositories/${encodeURIComponent(view.repository)}`;
const pathOf = (name: string) => name.split("/").map(encodeURIComponent).join("/");
const get = <T>(path: string, query: Query, signal?: AbortSignal) => ask<T>(base() + path, { query, signal });

function send<T>(method: string, path: string, body?: unknown, version?: number): Promise<T> {
  return ask<T>(base() + path, { method, body, headers: version === undefined ? {} : { "If-Match": `"${version}"` } });
}

async function ask<T>(path: string, options: Options = {}): Promise<T> {
  const response = await answer(path, options);
  return (response.status === 204 ? null : await response.json()) as T;
}

async function answer(path: string, options: Options): Promise<Response> {
  const used = token.value;
  const response = await fetch(addressOf(path, options.query ?? {}), requestOf(options));
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status !== 401) throw problem;
  if (token.value === used && !(await askToken(problem.detail))) throw problem;
  const again = await fetch(addressOf(path, options.query ?? {}), requestOf(options));
  if (!again.ok) throw again.status === 401 ? refused(await problemOf(again)) : await problemOf(again);
  return again;
}

const refused = (problem: Problem) => new Problem({ ...problem, title: "The token does not allow this", detail: problem.detail, expected: [] });

function requestOf(options: Options): RequestInit {
  const headers: Record<string, string> = { Accept: "application/json", ...options.headers };
  if (token.value) headers.Authorization = `Bearer ${token.value}`;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  const body = options.body === undefined ? {} : { body: JSON.stringify(options.body) };
  return { method: options.method ?? "GET", headers, credentials: "omit", ...(options.signal ? { signal: options.signal } : {}), ...body };
}

function addressOf(path: string, query: Query): URL {
  const address = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value === undefined || value === null || value === "") continue;
    for (const each of Array.isArray(value) ? (value as readonly string[]) : [value]) address.searchParams.append(name, String(each));
  }
  return address;
}
