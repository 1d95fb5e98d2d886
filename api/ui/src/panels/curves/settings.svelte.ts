/** How curves are drawn; kept in the address, so that a link restores all of it. */
import { flag, inAddress, list, number, oneOf, range, text } from "../../lib/own.svelte";
import { guessAim } from "../../lib/relevance";
import { MOST } from "./choice";

/** Which curves: a rule, or names; neither: the default choice. */
export const rule = inAddress("curves.pick", text(20));
export const lines = inAddress("curves.lines", list(MOST));
export const axis = inAddress("curves.x", oneOf("step", "time", "elapsed", "epoch"));
export const log = inAddress("curves.log", flag);
export const smoothing = inAddress("curves.smooth", number(0, 0, 0.99));
/** What curves are averaged by; empty: each is drawn. */
export const group = inAddress("curves.group", text(300));
/** What is drawn around a mean: the range from least to greatest, or one standard deviation to each side. */
export const band = inAddress("curves.band", oneOf("range", "sigma"));
/** Which values the axis makes room for: all of them, the central percents, or all but a few far ones that would squeeze the rest. */
export const span = inAddress("curves.y", oneOf("auto", "all", "98", "90"));
/** The visible part of the axis; null: all of it. */
export const zoom = inAddress("curves.zoom", range);
/** Metrics whose better direction is the opposite of what their name says. */
export const turned = inAddress("curves.turned", list());
/** Whether the selected state's detail is open beside the curves. */
export const beside = inAddress("curves.beside", flag);
/** Whether each rank of a job has its own curve, where it measured for itself; else they form a band. */
export const eachRank = inAddress("curves.ranks", flag);
export const full = inAddress("curves.full", flag);

export type Axis = (typeof axis)["value"];
export type Span = (typeof span)["value"];
export type BandKind = (typeof band)["value"];

/** Which values of a metric are better. */
export const aimOf = (key: string): "min" | "max" => ((guessAim(key) === "min") !== turned.value.includes(key) ? "min" : "max");

export function turn(key: string): void {
  turned.set(turned.value.includes(key) ? turned.value.filter((one) => one !== key) : [...turned.value, key]);
}

/** Draws these, whatever was drawn before. */
export function showCurvesOf(heads: readonly string[]): void {
  rule.set("");
  lines.set(heads);
}
