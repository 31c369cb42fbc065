"""Seeing what the compiler made of a stage: registers, memory, spills, PTX and SASS, without a GPU.

On the command line: ``python -m numba_gemm.inspect STAGE --cc 9.0``. `report` compiles and needs CUDA's compiler (the
extra cu12 or cu13); `sass` reads the GPU's instructions as text, and `ffma` what the multiply-adds among them wait for.
"""
