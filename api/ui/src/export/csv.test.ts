import { expect, it } from "vitest";
import { cellText, measured, Sheet } from "./csv";
import { fileName } from "./names";

it("writes numbers so that reading them gives them again", () => {
  const numbers = [0.1 + 0.2, -1e-300, 5e-324, 2 ** 53, -0.5, 1 / 3];
  expect(numbers.map((number) => Number(cellText(number)))).toEqual(numbers);
  expect(cellText(-0.5)).toBe("-0.5");
  expect([measured(null), measured(undefined), measured(0)].map(cellText)).toEqual(["NaN", "", "0"]);
});

it("makes no formula of a text", () => {
  expect(["=1+1", "+1", "-x", "@A1", "\tx", "a=b", "'"].map(cellText)).toEqual(["'=1+1", "'+1", "'-x", "'@A1", "'\tx", "a=b", "'"]);
  expect(cellText('=HYPERLINK("http://x","y")')).toBe(`"'=HYPERLINK(""http://x"",""y"")"`);
});

it("quotes what would end a cell", () => {
  expect(['say "so"', "a,b", "two\nlines", "plain"].map(cellText)).toEqual(['"say ""so"""', '"a,b"', '"two\nlines"', "plain"]);
});

it("keeps every row of a long table", () => {
  const sheet = new Sheet(["=n", "text"]);
  for (let number = 0; number < 60_000; number += 1) sheet.add([number, "twenty letters of it"]);
  expect(sheet.parts().length).toBeGreaterThan(1);
  const lines = sheet.text().split("\r\n");
  expect([lines[0], lines[1], lines.at(-2), lines.at(-1), lines.length]).toEqual(["'=n,text", "0,twenty letters of it", "59999,twenty letters of it", "", 60_002]);
});

it("names files by repository, view and metric", () => {
  expect(fileName("my runs", "curves", "val/loss", "svg")).toBe("my_runs-curves-val_loss.svg");
  expect(fileName("läufe", "branches", "", "csv")).toBe("läufe-branches.csv");
  expect(fileName("../../etc", "found", "a".repeat(300), "csv")).toMatch(/^etc-found-a{60}\.csv$/);
});
