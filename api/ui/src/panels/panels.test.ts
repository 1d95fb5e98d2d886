import { describe, expect, it, vi } from "vitest";
import { Problem } from "../lib/problem";
import { explain } from "./refs/explain";
import { loadLine, restoreLine, trackLine } from "./resume";
import { percent, plain, shapeText } from "./words";

vi.mock("../lib/api", () => ({ payloadAddress: (uid: string) => `/p/${uid}`, getStates: vi.fn() }));
const { fileAddress, fileName, literal } = await import("./download");
const { question } = await import("./detail/kin");
const uid = "0123456789abcdef01234567";

describe("commands", () => {
  it("train on along a branch whose head it is, else on a new one", () => {
    const place = { name: "runs", location: "/tmp/it's \\ runs" };
    const open = 'import datastates\n\nrepo = datastates.open("/tmp/it\'s \\\\ runs")\n';
    expect(trackLine(place, uid, "main")).toBe(`${open}run = repo.track(model=model, optimizer=optimizer, branch="main")`);
    expect(trackLine(place, uid, null)).toContain(`start="${uid}", branch="from-012345"`);
    expect(loadLine(place, "a/b")).toBe('import datastates\n\ntree = datastates.load("/tmp/it\'s \\\\ runs/a/b")');
    expect(restoreLine(place, uid)).toBe(`datastates restore ${uid} --into state.safetensors --repo '/tmp/it'\\''s \\ runs'`);
  });

  it("open a database with its packs, and name a gap where the place is not told", () => {
    expect(loadLine({ name: "runs", location: "postgresql://db/x", packs: "/packs" }, "main")).toBe('import datastates\n\nrepo = datastates.open("postgresql://db/x", packs="/packs")\ntree = repo.load("main")');
    expect(loadLine({ name: "runs", location: null }, "main") + restoreLine({ name: "runs" }, uid)).toMatch(/open\("PATH"\) {2}# of the repository runs\n.*--repo PATH$/s);
  });
});

describe("downloads", () => {
  it("ask for one path alone, whatever is in it", () => {
    expect(literal("a[0]*")).toBe("a[[]0][*]");
    expect(fileAddress(uid, "model/a b")).toBe(`/p/${uid}?only=model%2Fa%20b`);
    expect(fileName(uid, "model/w")).toBe("0123456789ab.model_w.safetensors");
  });
});

it("asks in the search grammar whether a state is on a branch", () => {
  expect(question("aa", 'x"y')).toBe('uid = "aa" and branch = "x\\"y"');
});

it("explains what the server does not know of the page", () => {
  expect(explain(new Problem({ status: 412 }))).toContain("look again");
  expect(explain(new Problem({ status: 500 }))).toBeNull();
});

it("writes parts, shapes and values", () => {
  expect([percent(null), percent(0), percent(0.5), percent(0.0000123)]).toEqual(["–", "0 %", "50 %", "0.0012 %"]);
  expect([shapeText([]), shapeText([2, 3])]).toEqual(["scalar", "2 × 3"]);
  expect([plain(null), plain("a"), plain([1])]).toEqual(["–", "a", "[1]"]);
});
