"""Trials of Optuna's TPE sampler fork from a shared prefix. A pruned trial frees its states.

python examples/optuna_prefix.py [FOLDER] [TRIALS]
A killed study continues: the sampler is seeded by the trial's number and proposes the same trials.
"""

import sys

import torch
from torch import nn

import datastates

try:
    import optuna
except ModuleNotFoundError:
    sys.exit("this example needs Optuna: pip install optuna")

torch.manual_seed(0)
X, MODEL = torch.randn(500, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def one_epoch(sgd: torch.optim.Optimizer) -> float:
    """Train on the first 400 rows, and return the loss on 100 others."""
    for rows in torch.randperm(400).split(20):
        sgd.zero_grad()
        nn.functional.mse_loss(MODEL(X[rows]), X[rows].sin()).backward()
        sgd.step()
    return nn.functional.mse_loss(MODEL(X[400:]), X[400:].sin()).item()


def objective(trial: optuna.Trial) -> float:
    """Train one trial for four epochs. Epochs that the lineage has are not trained again."""
    branch, noted = f"trial-{trial.number}", {"trial": trial.number}
    sgd = torch.optim.SGD(MODEL.parameters(), trial.suggest_float("lr", 1e-4, 1.0, log=True))
    losses = {one.step: one.metrics["loss"] for one in repo.find(f"attr.trial = {trial.number}")}
    was_pruned = bool(losses) and branch not in {ref.name for ref in repo.refs()}
    with repo.track(branch=branch, start="main", model=MODEL, sgd=sgd) as run:
        for epoch in range(1, 5):
            if run.step < epoch and not was_pruned:
                losses[epoch] = one_epoch(sgd)
                run.capture(step=epoch, metrics={"loss": losses[epoch]}, attributes=noted)
            trial.report(losses[epoch], epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
    return losses[4]


with datastates.open(sys.argv[1] if sys.argv[1:] else "runs/optuna") as repo:
    sgd = torch.optim.SGD(MODEL.parameters(), 0.1)
    with repo.track(model=MODEL, sgd=sgd) as run:
        if run.head is None:
            run.capture(step=0, metrics={"loss": one_epoch(sgd)}, attributes={"trial": -1})
    study = optuna.create_study()
    for number in range(int(sys.argv[2]) if sys.argv[2:] else 20):
        study.sampler = optuna.samplers.TPESampler(seed=number)
        study.optimize(objective, n_trials=1)
        if study.trials[-1].state == optuna.trial.TrialState.PRUNED:
            repo.delete_ref(f"trial-{number}", bytes=True)
