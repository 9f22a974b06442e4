"""What is changed in a program before Inductor compiles it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from . import _flipped, _layouts, _merge, _products
from ._flipped import flip_gradients
from ._layouts import turn_weights
from ._merge import merge_repeats
from ._products import choose_products


def own_passes(*, searches: bool = False) -> dict[str, Any]:
    """Options of torch.compile (Inductor) with which that is done. `searches`: the program is to search for its kernels."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # not public, so only where it is needed

    class Passes(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if searches:
                flip_gradients(graph)
            merge_repeats(graph)
            turn_weights(graph)
            choose_products(graph)

        def uuid(self) -> Any:
            files = [str(module.__file__) for module in (_flipped, _layouts, _merge, _products)]
            here = torch.backends.mkldnn.enabled, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()  # what trials depend on
            return get_hash_for_files((__file__, *files), extra=str((searches, *here)))

    return {"post_grad_custom_pre_pass": Passes()}
