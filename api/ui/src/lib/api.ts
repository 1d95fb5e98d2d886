/** The API of the chosen repository, one function for each route. Each throws `Problem`; a 401 asks for a token and retries once. */
import type { paths } from "../generated/openapi";
import { etagOf, etagOfNote, inPath } from "./paths";
import { Problem, problemOf } from "./problem";
import { askToken, token } from "./token.svelte";
import type { Clone, Forecast, Incomplete, Process, ServerInfo, Storage } from "../now/types";
import type { Merge, Report, ReportDetail, Study, StudyDetail } from "../studies/types";
import type { Branch, Branches, Comparison, GraphPage, Histogram, Note, Page, Parallels, Ref, Value } from "./types";
import { view } from "./view.svelte";

type Method = "get" | "post" | "put" | "patch" | "delete";
type Operation<P extends keyof paths, M extends Method> = NonNullable<paths[P][M]>;
type Query<P extends keyof paths> = Operation<P, "get"> extends { parameters: { query?: infer Q } } ? ([NonNullable<Q>] extends [never] ? Record<string, never> : Q) : never;
type Body<P extends keyof paths, M extends Method> = Operation<P, M> extends { requestBody: { content: { "application/json": infer B } } } ? B : never;
type Answer<P extends keyof paths, M extends Method = "get"> = Operation<P, M> extends { responses: infer R } ? AnswerOf<R> : never;
type AnswerOf<R> = R extends { 200: { content: { "application/json": infer A } } } ? A : R extends { 201: { content: { "application/json": infer A } } } ? A : null;

type Words = Record<string, string | number | boolean | null | undefined | readonly string[]>;
interface Options {
  method?: string;
  query?: Words;
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal | undefined;
}

const ROOT = "api/v1"; // relative to the page, which a proxy may serve under a prefix
const HERE = "/api/v1/repositories/{repository}";

/** Every repository of the server. */
export const getRepositories = () => get("/api/v1/repositories", {}, {});

export const resolve = (rev: string, signal?: AbortSignal) => get(`${HERE}/resolve`, {}, { rev }, signal);
export const getStates = (query: Query<`${typeof HERE}/states`>, signal?: AbortSignal) => get(`${HERE}/states`, {}, query, signal);
export const getState = (uid: string, signal?: AbortSignal) => get(`${HERE}/states/{uid}`, { uid }, {}, signal);
export const getLog = (uid: string, query: Query<`${typeof HERE}/states/{uid}/log`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/states/{uid}/log`, { uid }, query, signal);
export const getTensors = (uid: string, norms = false, signal?: AbortSignal) => get(`${HERE}/states/{uid}/tensors`, { uid }, { norms }, signal);
/** The graph to show: of all heads if none are given. With `fold`, stretches have one row each, except those that are opened. */
export interface GraphOf {
  heads: string[];
  fold: boolean;
  opened: string[];
  alone: string[];
}
const graphQuery = ({ heads, fold, opened, alone }: GraphOf) => ({
  ...(heads.length ? { head: heads } : {}), ...(fold ? { fold, ...(opened.length ? { open: opened } : {}), ...(alone.length ? { alone } : {}) } : {}),
});
export const getGraph = (of: GraphOf, window: { first?: number; count?: number; around?: string }, signal?: AbortSignal) =>
  get(`${HERE}/graph`, {}, { ...graphQuery(of), ...window }, signal) as Promise<GraphPage>;
/** An overview of that graph. */
export const getOverview = (of: GraphOf, signal?: AbortSignal) => get(`${HERE}/graph/overview`, {}, graphQuery(of), signal);
export const getSeries = (query: Query<`${typeof HERE}/series`>, signal?: AbortSignal) => get(`${HERE}/series`, {}, query, signal);
export const getStats = (signal?: AbortSignal) => get(`${HERE}/stats`, {}, {}, signal);
export const getRun = (uid: string, signal?: AbortSignal) => get(`${HERE}/runs/{uid}`, { uid }, {}, signal);
export const getRef = (name: string, signal?: AbortSignal) => get(`${HERE}/refs/{name}`, { name }, {}, signal);
export const getReflog = (name: string, query: Query<`${typeof HERE}/reflog/{name}`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/reflog/{name}`, { name }, query, signal);

/** The files that were captured with a state, and one of them. The server sends only PNG, JPEG, GIF and WebP as pictures. */
export const getFiles = (uid: string, signal?: AbortSignal) => get(`${HERE}/states/{uid}/files`, { uid }, {}, signal);
export const getFile = async (uid: string, name: string, signal?: AbortSignal): Promise<Blob> => (await answer(fill(`${HERE}/states/{uid}/files/{name}`, { uid, name }), { signal })).blob();

/** Every branch and tag. */
export const getRefs = (signal?: AbortSignal) => get(`${HERE}/refs`, {}, {}, signal);

/** The branches, one row each. */
export const getBranches = (query: Query<`${typeof HERE}/branches`>, signal?: AbortSignal) => get(`${HERE}/branches`, {}, query, signal) as Promise<Branches>;

export const getBranch = (name: string, query: Query<`${typeof HERE}/branches/{name}`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/branches/{name}`, { name }, query, signal) as Promise<Branch>;

export const getStudies = (signal?: AbortSignal) => get(`${HERE}/studies`, {}, {}, signal) as Promise<{ items: Study[]; total: number }>;
export const getStudy = (name: string, query: Query<`${typeof HERE}/studies/{name}`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/studies/{name}`, { name }, query, signal) as Promise<StudyDetail>;
export const getMerges = (query: Query<`${typeof HERE}/merges`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/merges`, {}, query, signal) as Promise<{ items: Merge[]; next: string | null; metric: string | null }>;
export const getReports = (signal?: AbortSignal) => get(`${HERE}/outliers`, {}, {}, signal) as Promise<Page<Report>>;
export const getReport = (id: number, query: Query<`${typeof HERE}/outliers/{report}`> = {}, signal?: AbortSignal) =>
  get(`${HERE}/outliers/{report}`, { report: String(id) }, query, signal) as Promise<ReportDetail>;

/** The picture of a sample. The server sends only PNG, JPEG, GIF and WebP. */
export const getPicture = async (report: number, index: number, signal: AbortSignal): Promise<Blob> =>
  (await answer(`${base()}/outliers/${report}/pictures/${index}`, { signal })).blob();

export const getProcesses = (signal?: AbortSignal) => get(`${HERE}/processes`, {}, {}, signal) as Promise<{ items: Process[]; total: number; metric: string | null }>;
/** The states of several ranks that are not complete. */
export const getIncomplete = (query: Query<`${typeof HERE}/incomplete`> = {}, signal?: AbortSignal) => get(`${HERE}/incomplete`, {}, query, signal) as Promise<Incomplete>;
export const getStorage = (signal?: AbortSignal) => get(`${HERE}/storage`, {}, {}, signal) as Promise<Storage>;
/** What retention would drop next; asking drops nothing. */
export const getForecast = (query: Query<`${typeof HERE}/retention`> = {}, signal?: AbortSignal) => get(`${HERE}/retention`, {}, query, signal) as Promise<Forecast>;
export const getClones = (query: Query<`${typeof HERE}/clones`> = {}, signal?: AbortSignal) => get(`${HERE}/clones`, {}, query, signal) as Promise<Page<Clone>>;
export const getServers = (signal?: AbortSignal) => get(`${HERE}/servers`, {}, {}, signal) as Promise<Page<ServerInfo>>;

/** Drops a state's bytes; `isForced` even if a name keeps them. */
export const evict = (uid: string, isForced: boolean): Promise<{ uid: string; bytes: number }> =>
  ask(fill(`${HERE}/states/{uid}/payload`, { uid }), { method: "DELETE", query: { force: isForced } });

/** Two states compared; without `tensors` only steps, metrics, values and code. */
export const getDiff = <T = Answer<`${typeof HERE}/diff`>>(query: { old: string; new: string; only?: string[]; tensors?: boolean; stat?: boolean }, signal?: AbortSignal) =>
  get(`${HERE}/diff`, {}, query, signal) as Promise<T>;

/** States side by side; no payload is read. */
export const getComparison = (revs: string[], signal?: AbortSignal) => get(`${HERE}/comparison`, {}, { rev: revs }, signal) as Promise<Comparison>;

/** Branches by settings and metrics, one axis for each. */
export const getParallels = (query: Query<`${typeof HERE}/parallels`>, signal?: AbortSignal) => get(`${HERE}/parallels`, {}, query, signal) as Promise<Parallels>;

/** How the values of a tensor are distributed in some states; the server reads it in pieces, and stops when nobody waits any more. */
export const getHistogram = (query: Query<`${typeof HERE}/histogram`>, signal?: AbortSignal) => get(`${HERE}/histogram`, {}, query, signal) as Promise<Histogram>;

export const makeRef = (name: string, ref: Body<`${typeof HERE}/refs/{name}`, "put">) => send("put", `${HERE}/refs/{name}`, { name }, ref);

/** Moves a ref that still is as it was seen; a Problem with status 412 says that it no longer is. */
export const moveRef = (seen: Ref, rev: string) => send("patch", `${HERE}/refs/{name}`, { name: seen.name }, { rev }, etagOf(seen));
export const deleteRef = (seen: Ref) => send("delete", `${HERE}/refs/{name}`, { name: seen.name }, undefined, etagOf(seen));

/** Sets attributes; null removes one. */
export const annotate = (uid: string, attributes: Record<string, Value>) => send("patch", `${HERE}/states/{uid}/attributes`, { uid }, { attributes });

/** The notes on a state or a branch, newest first. */
export const getNotes = (query: Query<`${typeof HERE}/notes`>, signal?: AbortSignal) => get(`${HERE}/notes`, {}, query, signal) as Promise<Page<Note>>;
export const writeNote = (note: Body<`${typeof HERE}/notes`, "post">) => send("post", `${HERE}/notes`, {}, note);
export const editNote = (note: Note, text: string) => send("patch", `${HERE}/notes/{uid}`, { uid: note.uid }, { text }, etagOfNote(note));
export const deleteNote = (note: Note) => send("delete", `${HERE}/notes/{uid}`, { uid: note.uid }, undefined, etagOfNote(note));

/** The address of a state's tensors as one safetensors file. A link cannot send a token: with one, use `download`. */
export const payloadAddress = (uid: string) => new URL(base() + `/states/${uid}/payload`, document.baseURI).href;

/** Save a state's tensors as a file, with the token. */
export async function download(uid: string): Promise<void> {
  const response = await answer(base() + `/states/${uid}/payload`, {});
  const address = URL.createObjectURL(await response.blob());
  const link = Object.assign(document.createElement("a"), { href: address, download: `${uid}.safetensors` });
  link.click();
  URL.revokeObjectURL(address);
}

/** The event stream: events after `lastId`, or from now on. It never asks for a token: the user's next action will. */
export async function openEvents(lastId: string | null, signal: AbortSignal): Promise<Response> {
  const headers = { Accept: "text/event-stream", ...(lastId ? { "Last-Event-ID": lastId } : {}) };
  const response = await fetch(addressOf(base() + "/events", {}), requestOf({ signal, headers }));
  if (!response.ok) throw await problemOf(response);
  return response;
}

const base = () => `${ROOT}/repositories/${encodeURIComponent(view.repository)}`;

/** The address of a route; names keep their slashes, as the API expects them. */
function fill(path: string, parts: Record<string, string>): string {
  const known: Record<string, string> = { repository: view.repository, ...parts };
  return path.slice(1).replace(/\{(\w+)\}/g, (_, name: string) => inPath(known[name] ?? ""));
}

async function get<P extends keyof paths>(path: P, parts: Record<string, string>, query: Query<P>, signal?: AbortSignal): Promise<Answer<P>> {
  return ask<Answer<P>>(fill(path, parts), { query: query as Words, signal });
}

async function send<P extends keyof paths, M extends Method>(
  method: M, path: P, parts: Record<string, string>, body: Body<P, M> | undefined, seen?: string,
): Promise<Answer<P, M>> {
  const headers: Record<string, string> = seen === undefined ? {} : { "If-Match": seen };
  return ask<Answer<P, M>>(fill(path, parts), { method: method.toUpperCase(), body, headers });
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

function addressOf(path: string, query: Words): URL {
  const address = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value === undefined || value === null || value === "") continue;
    for (const each of Array.isArray(value) ? (value as readonly string[]) : [value]) address.searchParams.append(name, String(each));
  }
  return address;
}
