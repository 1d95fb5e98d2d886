/** The content of the help. */

export const KEYS: readonly (readonly [readonly string[], string])[] = [
  [["/"], "filter"],
  [["j", "↓"], "next state"],
  [["k", "↑"], "previous state"],
  [["Home", "End"], "first and last state, also of what a filter found"],
  [["PgUp", "PgDn"], "a screenful up or down"],
  [["Enter"], "open the selected state"],
  [["g"], "go to a revision: main~3, warm, main@best:loss"],
  [["t"], "tag or branch the selected state"],
  [["m"], "mark for a diff"],
  [["d"], "diff with the marked state"],
  [["c"], "curves"],
  [["+", "−", "0"], "the graph larger, smaller, as usual; Ctrl and the wheel too"],
  [["Esc"], "close what is open"],
  [["?"], "this help"],
];

export const EXAMPLES: readonly (readonly [string, string])[] = [
  ["step > 500 and metrics.loss < 0.2", "two conditions; or, not and brackets work too"],
  ["order by metrics.loss limit 5", "the five lowest"],
  ["metrics.loss exists order by step desc", "only where it was measured"],
  ["branch = main", "on the path of a branch"],
  ["branch ~ \"fork\" or tag ~ \"best\"", "~ finds a part of a name"],
  ["descendant_of(warm)", "all that came from a state"],
  ["ancestor_of(main~3)", "all that led to it"],
  ["created > now-2h", "s, m, h, d, w; or a date"],
  ["status in (durable, external)", "where the bytes are"],
  ["config.optimizer.lr >= 0.1", "by the configuration of the training"],
];
