"""Memory laboratory: predicted and measured costs of each data path of a GPU, one file per experiment.

``numba-gemm lab --list`` lists the experiments, ``numba-gemm lab NAME...`` runs them, and
``numba-gemm lab memory`` runs all of them.
In Python, `Experiment.frame` takes the same parameters and returns a DataFrame::

    from numba_gemm.lab.registry import load
    frame = load("strided_copy").frame(strides=[1, 2, 4])

The experiments follow the memory chapter of the CUDA C++ Best Practices Guide and carry its section numbers.
"""
