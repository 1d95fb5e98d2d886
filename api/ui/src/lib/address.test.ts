import { describe, expect, it } from "vitest";
import { DEFAULTS, parseAddress, writeAddress, type View } from "./address";

const UID = "0123456789abcdef01234567";

describe("address", () => {
  it("says nothing of a view that is as it would be anyway", () => {
    expect(writeAddress({ ...DEFAULTS })).toBe("");
  });

  it("brings a whole view back", () => {
    const view: View = {
      repository: "runs & more", scene: "graph", by: "-best", metric: "val_loss", group: "config.lr", opened: ["b".repeat(24)], alone: ["c".repeat(24)],
      heads: ["main~3", "without/3"],
      query: 'metrics."val loss" < 0.2 or step > 5',
      columns: ["step", "metrics.a,b", "attr.x=y"],
      sort: "metrics.loss desc",
      selected: UID,
      marked: UID.replace("0", "f"),
      panel: "diff",
      keys: ["val/loss", "lr"],
      study: "rates/first",
      report: "3",
      theme: "dark",
      own: { "curves.log": "1", zoom: "2" },
    };
    expect(parseAddress(writeAddress(view))).toEqual(view);
  });

  it("shows states where a link of before names some", () => {
    expect([parseAddress("?q=step>3").scene, parseAddress("?panel=curves").scene, parseAddress("?repo=runs&theme=dark").scene]).toEqual(["states", "states", DEFAULTS.scene]);
    expect(writeAddress({ ...DEFAULTS, scene: "states", query: "step > 3" })).toBe("?q=step+%3E+3");
  });

  it("keeps what it does not know for the panel that does, but no more than fits", () => {
    expect(parseAddress("?later.smooth=0.5&Bad=1&__proto__=2&q=step").own).toEqual({ "later.smooth": "0.5" });
    expect(parseAddress(`?long=${"x".repeat(3000)}`).own).toEqual({});
    expect(Object.keys(parseAddress(`?${Array.from({ length: 99 }, (_, n) => `k${n}=1`).join("&")}`).own)).toHaveLength(40);
  });

  it("takes nothing that cannot be", () => {
    const view = parseAddress("?state=../../etc&mark=12&panel=everything&theme=pink&head=&key=");
    expect(view).toEqual(DEFAULTS);
  });
});
