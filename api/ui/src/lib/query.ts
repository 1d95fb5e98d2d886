/** The search grammar, as far as the page must know it: where its words begin, what may follow, and how an order is added. */

export interface Word {
  kind: "name" | "text" | "operator" | "number" | "open" | "close" | "comma" | "other";
  text: string;
  from: number;
  to: number;
}

const PATTERN =
  /(?<text>"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|(?<operator>==|!=|<=|>=|=|<|>|~)|(?<open>\()|(?<close>\))|(?<comma>,)|(?<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w./-]))|(?<name>[^\W\d][\w/-]*(?:\.(?:[\w/-]+|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)?)*)|(?<other>[^\s()"',=<>!~]+|.)/gsu;

/** The words of a query, even an unfinished one. */
export function wordsOf(query: string): Word[] {
  const words: Word[] = [];
  for (const match of query.matchAll(PATTERN)) {
    if (!match[0].trim()) continue;
    const kind = Object.entries(match.groups ?? {}).find(([, value]) => value !== undefined)?.[0] as Word["kind"];
    words.push({ kind, text: match[0], from: match.index, to: match.index + match[0].length });
  }
  return words;
}

const isWord = (word: Word | undefined, ...texts: string[]) => word?.kind === "name" && texts.includes(word.text.toLowerCase());

/** Where the clause `order by` begins and ends, which is before `limit`; null when there is none. */
export function orderOf(query: string): { from: number; to: number } | null {
  const words = wordsOf(query);
  const at = words.findIndex((word, index) => isWord(word, "order") && isWord(words[index + 1], "by"));
  if (at < 0) return null;
  const limit = words.findIndex((word, index) => index > at && isWord(word, "limit"));
  return { from: words[at]!.from, to: limit < 0 ? query.length : words[limit]!.from };
}

/** A query without its order, which a click on a header replaces. */
export function withoutOrder(query: string): string {
  const order = orderOf(query);
  return order ? `${query.slice(0, order.from).trimEnd()} ${query.slice(order.to)}`.trim() : query;
}

/** A query in the order that a header asks for, unless it has an order of its own. Its text keeps its columns. */
export function withOrder(query: string, sort: string): string {
  if (!sort || orderOf(query)) return query;
  const limit = wordsOf(query).find((word, index, words) => isWord(word, "limit") && words[index + 1]?.kind === "number");
  if (!limit) return `${query.trimEnd()} order by ${sort}`.trimStart();
  return `${query.slice(0, limit.from).trimEnd()} order by ${sort} ${query.slice(limit.from)}`.trimStart();
}

/** The sort after a click on a header: first down, then up, then none. */
export function nextSort(sort: string, field: string): string {
  if (sort === `${field} desc`) return `${field} asc`;
  return sort === `${field} asc` ? "" : `${field} desc`;
}

// Completion

export interface Vocabulary {
  metrics: readonly { key: string; hint: string }[];
  attributes: readonly string[];
  config: readonly string[];
  refs: readonly string[];
  statuses: readonly string[];
}

export interface Option {
  /** The text that replaces the word; the user continues to type at the caret in it. */
  text: string;
  hint: string;
}

export interface Completion {
  from: number;
  to: number;
  options: Option[];
}

const FIELDS: readonly Option[] = [
  { text: "step", hint: "number of the step" },
  { text: "created", hint: "2026-11-21, now-2h" },
  { text: "status", hint: "durable, evicted, …" },
  { text: "branch", hint: "states on a branch" },
  { text: "tag", hint: "states with a tag" },
  { text: "message", hint: "text of the capture" },
  { text: "uid", hint: "beginning of a uid" },
  { text: "micro_step", hint: "within an accumulated step" },
  { text: "run.host", hint: "machine" },
  { text: "run.user", hint: "who" },
  { text: "run.git_commit", hint: "code" },
  { text: "run.uid", hint: "process" },
];
const RELATIONS: readonly Option[] = [
  { text: "ancestor_of(", hint: "of a revision" },
  { text: "descendant_of(", hint: "of a revision" },
  { text: "not ", hint: "the opposite" },
  { text: "exists ", hint: "has it at all" },
];
const CLASSES: readonly Option[] = [
  { text: "nan ", hint: "not a number" },
  { text: "inf ", hint: "infinite" },
  { text: "finite ", hint: "neither" },
];
const AFTER: readonly Option[] = [
  { text: "and ", hint: "both" }, { text: "or ", hint: "either" }, { text: "order by ", hint: "sort" }, { text: "limit ", hint: "at most" },
];
const OPERATORS = ["=", "!=", "<", "<=", ">", ">="];

/** What may stand at the caret: fields, operators, values or connectives that match what has been typed. */
export function complete(query: string, caret: number, known: Vocabulary): Completion {
  const words = wordsOf(query.slice(0, caret));
  const last = words.at(-1);
  const isTyping = last !== undefined && last.to === caret && (last.kind === "name" || last.kind === "text" || last.kind === "other");
  const before = isTyping ? words.slice(0, -1) : words;
  const typed = isTyping ? last.text : "";
  const from = isTyping ? last.from : caret;
  const options = optionsAfter(before, known).filter((option) => matches(option.text, typed));
  return { from, to: caret, options: options.filter((option) => option.text.trim() !== typed).slice(0, 40) };
}

function matches(option: string, typed: string): boolean {
  const [whole, part] = [option.toLowerCase(), typed.toLowerCase().replace(/^["']/, "")];
  return whole.startsWith(part) || whole.includes(`.${part}`) || (part.length > 1 && whole.includes(part));
}

function optionsAfter(words: readonly Word[], known: Vocabulary): Option[] {
  const last = words.at(-1);
  const previous = words.at(-2);
  const listing = listingOf(words);
  if (isWord(last, "by") || (last?.kind === "comma" && isOrdering(words))) return fields(known);
  if (isWord(last, "order")) return [{ text: "by ", hint: "" }];
  if (isWord(last, "limit")) return [10, 50, 100].map((count) => ({ text: String(count), hint: "states" }));
  if (isWord(last, "is") && previous !== undefined) return [...CLASSES, { text: "not ", hint: "a number of another class" }];
  if (isWord(last, "not") && isWord(previous, "is")) return CLASSES.slice();
  if (last === undefined || isWord(last, "and", "or", "not")) return [...fields(known), ...RELATIONS];
  if (isWord(last, "exists") && !isFieldAt(words, words.length - 2)) return fields(known);
  if (listing) return last.kind === "open" || last.kind === "comma" ? values(listing, known) : [{ text: ", ", hint: "one more" }, { text: ") ", hint: "" }];
  if (last.kind === "open") return isWord(previous, "ancestor_of", "descendant_of") ? names(known) : [...fields(known), ...RELATIONS];
  if (last.kind === "operator") return values(previous, known);
  if (isFieldAt(words, words.length - 1)) return isOrdering(words) ? directions() : operators(last, known);
  return AFTER.slice();
}

/** The field whose list of values, `in (…`, is not closed. */
function listingOf(words: readonly Word[]): Word | undefined {
  const at = words.findLastIndex((word) => word.kind === "open" || word.kind === "close");
  return words[at]?.kind === "open" && isWord(words[at - 1], "in") ? words[at - 2] : undefined;
}

const KEYWORDS = ["and", "or", "not", "is", "in", "exists", "order", "by", "asc", "desc", "limit", "ancestor_of", "descendant_of"];

/** Whether a word is a field: a name that is neither a keyword nor a value. */
function isFieldAt(words: readonly Word[], at: number): boolean {
  const [word, before] = [words[at], words[at - 1]];
  if (word?.kind !== "name" || isWord(word, ...KEYWORDS) || before?.kind === "operator") return false;
  if (isWord(before, "is") || (isWord(before, "not") && isWord(words[at - 2], "is"))) return false;
  return !(before?.kind === "open" && isWord(words[at - 2], "ancestor_of", "descendant_of")) && listingOf(words.slice(0, at)) === undefined;
}

const isOrdering = (words: readonly Word[]) => words.some((word, index) => isWord(word, "order") && isWord(words[index + 1], "by"));
const directions = (): Option[] => [{ text: "desc", hint: "highest first" }, { text: "asc", hint: "lowest first" }, { text: "limit ", hint: "at most" }];
const names = (known: Vocabulary): Option[] => known.refs.map((name) => ({ text: name, hint: "" }));

/** The fields of a query in its order, each once. A bare name is written in full: a metric, else a setting, else an attribute. */
export function fieldsOf(query: string, known: Keys): string[] {
  const words = wordsOf(query);
  return [...new Set(words.filter((_, index) => isFieldAt(words, index)).map((word) => fullName(word.text, known)))];
}

/** The names of a repository, by which bare names are looked up. */
export type Keys = { [kind in "metrics" | "config" | "attributes"]?: readonly (string | { key: string })[] };

/** A field without its quotes, and with what a bare name leaves out; a name that nothing has stays as it is. */
function fullName(text: string, known: Keys): string {
  const name = text.replace(/"((?:[^"\\]|\\.)*)"?|'((?:[^'\\]|\\.)*)'?/gs, (_, double?: string, single?: string) => (double ?? single ?? "").replace(/\\(.)/gs, "$1"));
  if (FIELDS.some((field) => field.text === name) || /^(metrics|config|attr)\./.test(name)) return name;
  const has = (keys: Keys[keyof Keys]) => keys?.some((key) => (typeof key === "string" ? key : key.key) === name);
  const prefix = has(known.metrics) ? "metrics." : has(known.config) ? "config." : has(known.attributes) ? "attr." : "";
  return prefix + name;
}

function fields(known: Vocabulary): Option[] {
  const keyed = (prefix: string, key: string, hint: string): Option => ({ text: `${prefix}.${quoteKey(key)}`, hint });
  return [
    ...known.metrics.map((one) => keyed("metrics", one.key, one.hint)),
    ...FIELDS,
    ...known.attributes.map((key) => keyed("attr", key, "attribute")),
    ...known.config.map((key) => keyed("config", key, "configuration")),
  ];
}

function operators(field: Word, known: Vocabulary): Option[] {
  const exists = { text: "exists ", hint: "has it at all" };
  const of = (texts: readonly string[]) => texts.map((text) => ({ text: `${text} `, hint: "" }));
  const name = fullName(field.text, known);
  if (name === "branch" || name === "tag") return [...of(["=", "!=", "~", "in ("]), exists];
  if (name === "status" || name === "uid") return of(["=", "!=", "in ("]);
  const isFixed = FIELDS.some((one) => one.text === name);
  const isText = isFixed ? name === "message" || name.startsWith("run.") : !name.startsWith("metrics.");
  return [...of(isText ? [...OPERATORS, "~", "in ("] : [...OPERATORS, "in ("]), ...(isFixed ? [] : [{ text: "is ", hint: "nan, inf or finite" }]), exists];
}

function values(field: Word | undefined, known: Vocabulary): Option[] {
  switch (field?.text) {
    case "branch":
    case "tag":
      return names(known);
    case "status":
      return known.statuses.map((text) => ({ text, hint: "" }));
    case "created":
      return ["now-1h", "now-1d", "now-1w"].map((text) => ({ text, hint: "" }));
  }
  return [];
}

/** A key as the grammar requires it: quoted if it is not plain. */
export function quoteKey(key: string): string {
  return /^[\w/-]+(\.[\w/-]+)*$/u.test(key) ? key : `"${key.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}
