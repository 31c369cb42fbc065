"""Names of all experiments, and where they are defined."""

import importlib

from numba_gemm.lab.harness.experiment import Experiment

MEMORY = (
    *("transfers", "overlap", "zero_copy", "mapped_streams", "unified_addressing", "memory_spaces", "carve_out"),
    *("coalescing", "misaligned_copy", "strided_copy", "l2_persistence", "bank_conflicts", "narrow_product"),
    *("partial_tiles", "product_with_transpose", "async_copies", "barriers", "allocation", "numa"),
)
"""Experiments on memory, in the order of the guide's sections."""

GROUPS = {"memory": MEMORY}
"""Names that stand for several experiments."""

EXPERIMENTS = {
    "bench": "bench.experiment:EXPERIMENT",
    "targets": "bench.targets.experiment:EXPERIMENT",
    "ceilings": "bench.ceilings:EXPERIMENT",
    "counters": "bench.counters:EXPERIMENT",
    "shared_wavefronts": "bench.counters:SHARED_WAVEFRONTS",
    "tracer_counted": "bench.tracer:COUNTING",
    "tracer": "bench.tracer:EXPERIMENT",
    "accuracy": "bench.accuracy:EXPERIMENT",
    "tensor_ladder": "bench.tensor_ladder:TENSOR_LADDER",
    "special_values": "bench.tensor_ladder:SPECIAL_VALUES",
    "energy": "bench.energy:EXPERIMENT",
    "orders": "bench.orders:EXPERIMENT",
    "streamed": "bench.streamed:EXPERIMENT",
    "distributed": "bench.distributed:EXPERIMENT",
    "first_products": "bench.first_products:EXPERIMENT",
    "transformer_step": "bench.transformer:STEP",
    "training": "bench.transformer:TRAINING",
    "random_products": "bench.random_products:RANDOM_PRODUCTS",
    "batches": "bench.batches:EXPERIMENT",
    "router_gates": "bench.random_products:ROUTER_GATES",
    "choices": "bench.choices:EXPERIMENT",
    "torch_calls": "bench.torch_calls:EXPERIMENT",
    **{name: f"memory.{name}:EXPERIMENT" for name in MEMORY},
}
"""Module and attribute of each experiment."""


def load(name: str) -> Experiment:
    """Return an experiment by its name, or raise ValueError."""
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}; expected one of: {', '.join((*GROUPS, *EXPERIMENTS))}")
    module, _, attribute = EXPERIMENTS[name].partition(":")
    experiment = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    assert isinstance(experiment, Experiment)
    return experiment
