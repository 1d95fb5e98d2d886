import { expect, it } from "vitest";
import { colourNumber } from "./colours";

it("gives a name the colour that every other part gives it", () => {
  expect(["main", "", "a", "fork", "hot/cooler", "größe"].map(colourNumber)).toEqual([0, 8, 8, 2, 7, 9]);
});
