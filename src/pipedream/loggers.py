"""Loggers for ``Pipeline(loggers=...)``, `Recipe` and ``pipedream train --log``; Lightning's loggers work too.

pipedream.Recipe(..., loggers=[pipedream.loggers.WandbLogger(project="digits")])
"""

from pipedream.runtime.results.loggers import CSVLogger as CSVLogger
from pipedream.runtime.results.loggers import Logger as Logger
from pipedream.runtime.results.loggers import MLFlowLogger as MLFlowLogger
from pipedream.runtime.results.loggers import TensorBoardLogger as TensorBoardLogger
from pipedream.runtime.results.loggers import WandbLogger as WandbLogger
