"""Certified robustness by randomized smoothing (Cohen et al. 2019), of plain and of tailored classifiers."""

from ._attack import attack as attack
from ._attack import descend_within as descend_within
from ._certify import ABSTAIN as ABSTAIN
from ._certify import Certificates as Certificates
from ._certify import Smoothed as Smoothed
from ._certify import lower_bound as lower_bound
from ._certify import outer_sigma as outer_sigma
from ._tables import average_radius as average_radius
from ._tables import bootstrap_difference as bootstrap_difference
from ._tables import certified_accuracy as certified_accuracy
from ._tables import read_log as read_log

__all__ = [
    "ABSTAIN",
    "Certificates",
    "Smoothed",
    "attack",
    "average_radius",
    "bootstrap_difference",
    "certified_accuracy",
    "descend_within",
    "lower_bound",
    "outer_sigma",
    "read_log",
]
