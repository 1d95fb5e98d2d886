"""The pictures that examples learn from: Fashion-MNIST of Debian's dataset-fashion-mnist, else
the digits of scikit-learn."""

from __future__ import annotations

from datastates.demo.outliers import CLOTHES as CLOTHES
from datastates.demo.outliers import FOLDER as FOLDER
from datastates.demo.outliers import load as load
