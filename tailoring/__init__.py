"""Tailoring: a model minimises an unsupervised loss on the very query that it is about to answer."""

from . import baselines as baselines
from . import losses as losses
from . import nn as nn
from . import random as random
from . import theory as theory
from ._adapt import CN as CN
from ._adapt import Adapter as Adapter
from ._adapt import Shift as Shift
from ._batch import Trace as Trace
from ._casts import Site as Site
from ._check import Report as Report
from ._check import check as check
from ._optimisers import LBFGS as LBFGS
from ._optimisers import Descent as Descent
from ._outer import OuterLoss as OuterLoss
from ._outer import outer_losses as outer_losses
from ._outer import task_losses as task_losses
from ._tailored import Tailored as Tailored
from ._trees import Inputs as Inputs
from ._trees import Support as Support
from ._tune import Tuned as Tuned
from ._tune import tune as tune
from ._weights import Weights as Weights

__version__ = "0.1.0"

# All but `nn` and `random`, so that `from tailoring import *` does not hide the user's own.
__all__ = [
    "CN",
    "LBFGS",
    "Adapter",
    "Descent",
    "Inputs",
    "OuterLoss",
    "Report",
    "Shift",
    "Site",
    "Support",
    "Tailored",
    "Trace",
    "Tuned",
    "Weights",
    "baselines",
    "check",
    "losses",
    "outer_losses",
    "task_losses",
    "theory",
    "tune",
]
