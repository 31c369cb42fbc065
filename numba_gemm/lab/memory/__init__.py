"""The memory laboratory: what each path of data costs on a GPU, predicted and measured, one experiment a file.

``python -m numba_gemm.lab.memory --list`` names the experiments, ``python -m numba_gemm.lab.memory NAME...`` runs them.
In Python each is a function with parameters that returns a DataFrame::

    from numba_gemm.lab.memory.strided_copy import strided_copy
    frame = strided_copy(strides=[1, 2, 4])

They follow the memory chapter of the CUDA C++ Best Practices Guide, by whose sections they are numbered.
"""
