"""Tailoring losses: `loss(model, x) -> (queries,)`, no labels. They add and scale: `Conserve(energy) + 10 * Conserve(momentum)`."""

from ._base import Loss as Loss
from ._base import input_of as input_of
from ._classes import Align as Align
from ._classes import Entropy as Entropy
from ._classes import WorstCase as WorstCase
from ._physics import Conserve as Conserve
from ._physics import Equivariant as Equivariant
from ._physics import Misfit as Misfit
from ._physics import Residual as Residual
from ._physics import Supervised as Supervised
from ._views import Agree as Agree
from ._views import MarginalEntropy as MarginalEntropy
from ._views import Rotation as Rotation
from ._views import Smooth as Smooth
