"""Loggers for ``Pipeline(loggers=...)``, `Recipe` and ``pipedream train --log``; Lightning's loggers work too.

pipedream.Recipe(..., loggers=[pipedream.loggers.WandbLogger(project="digits")])
"""

from pipedream.services.loggers.loggers import (
    CSVLogger as CSVLogger,
    Logger as Logger,
    MLFlowLogger as MLFlowLogger,
    TensorBoardLogger as TensorBoardLogger,
    WandbLogger as WandbLogger,
)
