import gc
import sys

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are small: threads cost more than they bring


LONG = (
    "compiled",
    "smoothing_results",
    "compiled_passes",
    "benchmarks",
    "certify",
    "modes",
    "planets",
    "contrastive",
    "laws",
    "examples",
    "reuse",
)


def pytest_collection_modifyitems(items):
    """Files that take long go first, so that two workers, which take one after another, end together."""
    order = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
    gc.freeze()  # what was imported stays: tests that compile took a tenth longer to look for garbage in it again and again


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def compiled_afresh():
    torch.compiler.reset()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item):
    """The mark `no_cover` in xdist's workers too: pytest-cov starts coverage twice there and halts one: dynamo was still watched."""
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    watching = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(watching)
