import { describe, expect, it } from "vitest";
import { complete, fieldsOf, nextSort, orderOf, wordsOf, withOrder, withoutOrder, type Vocabulary } from "./query";

const known: Vocabulary = {
  metrics: [{ key: "loss", hint: "0 … 1" }, { key: "val loss", hint: "" }, { key: "val/acc", hint: "" }],
  attributes: ["epoch"],
  config: ["lr"],
  refs: ["main", "round/1"],
  statuses: ["durable", "lost"],
};
const offered = (query: string) => complete(query, query.length, known).options.map((option) => option.text);

describe("words", () => {
  it("reads names with quoted keys as one", () => {
    expect(wordsOf('metrics."a \\" b" < 0.2').map((word) => word.text)).toEqual(['metrics."a \\" b"', "<", "0.2"]);
  });

  it("reads what is not finished, and loses no column", () => {
    const words = wordsOf("message ~ 'half");
    expect(words.at(-1)).toEqual({ kind: "text", text: "'half", from: 10, to: 15 });
  });
});

describe("order", () => {
  it("is put before the limit, and what stands before it keeps its column", () => {
    expect(withOrder("step > 5 limit 3", "step desc")).toBe("step > 5 order by step desc limit 3");
    expect(withOrder("", "metrics.loss asc")).toBe("order by metrics.loss asc");
  });

  it("of the query itself stands", () => {
    expect(withOrder("step > 5 ORDER BY step", "metrics.loss desc")).toBe("step > 5 ORDER BY step");
  });

  it("is not found within quotes", () => {
    expect(orderOf("message ~ 'order by step'")).toBeNull();
  });

  it("is taken out by a click on a header, the limit is not", () => {
    expect(withoutOrder("step > 5 order by step desc, metrics.loss limit 7")).toBe("step > 5 limit 7");
    expect(withoutOrder("order by step")).toBe("");
  });

  it("goes down, up, and away", () => {
    expect(nextSort("", "step")).toBe("step desc");
    expect(nextSort("step desc", "step")).toBe("step asc");
    expect(nextSort("step asc", "step")).toBe("");
    expect(nextSort("step asc", "metrics.loss")).toBe("metrics.loss desc");
  });
});

describe("completion", () => {
  it("offers fields at the beginning and after a connective", () => {
    for (const query of ["", "step > 5 and ", "(", "not "]) expect(offered(query)).toEqual(expect.arrayContaining(["metrics.loss", 'metrics."val loss"', "step", "attr.epoch", "config.lr"]));
  });

  it("finds a metric by its own name", () => {
    expect(offered("los")).toEqual(["metrics.loss", 'metrics."val loss"']);
    expect(offered("acc")).toEqual(["metrics.val/acc"]);
  });

  it("replaces what was typed of a word and no more", () => {
    expect(complete("step > 5 and metrics.lo", 23, known)).toMatchObject({ from: 13, to: 23 });
  });

  it("offers operators after a field, and values after an operator", () => {
    expect(offered("metrics.loss ")).toEqual(expect.arrayContaining(["< ", "exists "]));
    expect(offered("metrics.loss ")).not.toContain("~ ");
    expect(offered("branch = ")).toEqual(["main", "round/1"]);
    expect(offered("status = d")).toEqual(["durable"]);
    expect(offered("created > ")).toContain("now-1h");
  });

  it("offers names for the revision of a relation", () => {
    expect(offered("descendant_of(")).toEqual(["main", "round/1"]);
  });

  it("offers connectives after a condition", () => {
    for (const query of ["step > 5 ", "branch = main ", "ancestor_of(main) "]) expect(offered(query)).toEqual(["and ", "or ", "order by ", "limit "]);
  });

  it("offers the classes of numbers after a metric, a setting or a bare name, and nowhere else", () => {
    for (const field of ["metrics.loss", "config.lr", "attr.epoch", "loss", "lr", "unheard"]) expect(offered(`${field} `)).toContain("is ");
    for (const field of ["step", "created", "message", "branch"]) expect(offered(`${field} `)).not.toContain("is ");
    expect(offered("metrics.loss is ")).toEqual(["nan ", "inf ", "finite ", "not "]);
    expect(offered("metrics.loss is not ")).toEqual(["nan ", "inf ", "finite "]);
    for (const query of ["metrics.loss is nan ", "loss is not finite "]) expect(offered(query)).toEqual(["and ", "or ", "order by ", "limit "]);
    expect(offered("metrics.loss is nan and los")).toContain("metrics.loss");
  });

  it("offers to a bare name the operators of what it names", () => {
    expect(offered("loss ")).not.toContain("~ ");
    for (const name of ["lr", "epoch"]) expect(offered(`${name} `)).toContain("~ ");
  });

  it("offers values within a list, and fields after exists", () => {
    expect(offered("status in (")).toEqual(["durable", "lost"]);
    expect(offered("status in (durable, ")).toEqual(["durable", "lost"]);
    expect(offered("status in (durable ")).toEqual([", ", ") "]);
    expect(offered("status in (durable) ")).toContain("and ");
    expect(offered("exists ")).toContain("metrics.loss");
    expect(offered("loss exists ")).toContain("and ");
  });

  it("offers fields and directions within an order", () => {
    expect(offered("order by ")).toContain("metrics.loss");
    expect(offered("order by step ")).toEqual(["desc", "asc", "limit "]);
  });
});

describe("fields", () => {
  it("are in full what bare names are: a metric, else a setting, else an attribute", () => {
    const both = { ...known, config: ["lr", "loss"], attributes: ["epoch", "lr"] };
    expect(fieldsOf("loss < 2 and lr = 0.1 or epoch exists order by step", both)).toEqual(["metrics.loss", "config.lr", "attr.epoch", "step"]);
    expect(fieldsOf('metrics."val loss" is nan or config."loss" = 1', both)).toEqual(["metrics.val loss", "config.loss"]);
  });

  it("are neither values nor keywords", () => {
    expect(fieldsOf("branch = loss and status in (lr, epoch) and ancestor_of(loss) and step is not nan order by unheard desc limit 3", known)).toEqual(["branch", "status", "step", "unheard"]);
  });
});
