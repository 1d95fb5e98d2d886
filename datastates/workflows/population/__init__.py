"""Population-based training."""

from .members import Member, Population
from .training import Perturb, perturbed, population

__all__ = ["Member", "Perturb", "Population", "perturbed", "population"]
