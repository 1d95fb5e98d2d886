"""The pictures that examples learn from: Fashion-MNIST of Debian's dataset-fashion-mnist, else
the digits of scikit-learn."""

from __future__ import annotations

from datastates.demo.outliers import CLOTHES, FOLDER, load

__all__ = ["CLOTHES", "FOLDER", "load"]
