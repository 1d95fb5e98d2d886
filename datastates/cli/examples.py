"""One example line for each command, which its ``--help`` shows. The tests run each of them, unless it never ends by itself."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES = {
    "branches": "datastates branches 'metrics.val_loss < 0.2' --sort best",
    "best": "datastates best val_loss",
    "watch": "datastates watch --metric val_loss --every 5",
    "runs": "datastates runs -n 5",
    "stats": "datastates stats",
    "incomplete": "datastates incomplete",
    "du": "datastates du",
    "cadence": "datastates cadence main --mtbf 6h",
    "log": "datastates log main --columns val_loss --since 7d",
    "show": "datastates show main@best:val_loss",
    "find": "datastates find 'metrics.val_loss < 0.2 and step > 500 order by metrics.val_loss limit 5'",
    "compare": "datastates compare main main~3",
    "diff": "datastates diff main~3 main --only 'model/*' --sort change",
    "blame": "datastates blame main --only 'model/*' --size",
    "bisect": "datastates bisect main~3 main --metric 'val_loss > 0.13'",
    "config": "datastates config main --diff main~3",
    "refs": "datastates refs",
    "reflog": "datastates reflog main",
    "tag": "datastates tag baseline main~3 --message 'before the new schedule'",
    "branch": "datastates branch second-try main@best:val_loss",
    "rm": "datastates rm second-try --bytes --dry-run",
    "annotate": "datastates annotate main --metric test_loss=0.31",
    "note": "datastates note main --message 'diverges *after* the warm-up'",
    "restore": "datastates restore main@best:val_loss --into weights.safetensors --only model",
    "export": "datastates export baseline --bundle baseline-bundle",
    "import": "datastates import baseline-bundle --repo elsewhere",
    "clone": "datastates clone tcp://127.0.0.1:4711/main --repo mine",
    "serve": "datastates serve http://127.0.0.1:8642 tcp://127.0.0.1:4711",
    "token": "datastates token clone.token",
    "init": "datastates init elsewhere",
    "verify": "datastates verify",
    "repair": "datastates repair",
    "gc": "datastates gc --dry-run",
    "reindex": "datastates reindex --replace",
    "prune": "datastates prune --keep 'latest:5 best:3:val_loss' --dry-run",
    "doctor": "datastates doctor",
    "demo": "datastates demo --short",
}
"""The examples by the name of the command."""
