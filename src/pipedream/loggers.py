"""Loggers for ``Pipeline(loggers=...)``, `Recipe` and ``pipedream train --log``; Lightning's loggers work too.

pipedream.Recipe(..., loggers=[pipedream.loggers.WandbLogger(project="digits")])
"""

from __future__ import annotations

from pipedream.runtime.results.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
