"""The paper's theory as tools: one function for each statement, to be run on your own model, data and losses."""

from ._activations import Activation as Activation
from ._activations import activation_facts as activation_facts
from ._bounds import Bound as Bound
from ._bounds import empirical_rademacher as empirical_rademacher
from ._bounds import monotone_envelope as monotone_envelope
from ._bounds import rademacher_bound as rademacher_bound
from ._bounds import stability_bound as stability_bound
from ._conditions import Conditions as Conditions
from ._conditions import augmentation_gap as augmentation_gap
from ._conditions import conditions as conditions
from ._conditions import separating_network as separating_network
from ._conditions import with_noise as with_noise
from ._contrastive import Contrastive as Contrastive
from ._contrastive import contrastive_tailoring_loss as contrastive_tailoring_loss
from ._contrastive import convexity_gap as convexity_gap
from ._contrastive import expected_task_loss as expected_task_loss
from ._contrastive import hinge as hinge
from ._contrastive import logistic as logistic
from ._enough import Enough as Enough
from ._enough import enough as enough
from ._expressivity import LastLayer as LastLayer
from ._expressivity import last_layer as last_layer
from ._stability import Pull as Pull
from ._stability import Stability as Stability
from ._stability import measure_stability as measure_stability
from ._stability import pulls_closer as pulls_closer
