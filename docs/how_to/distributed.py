"""A product of matrices that are divided among the GPUs of one host or several, checked against float64.

On the GPUs of one host, or without a GPU on the simulator:

    torchrun --nproc_per_node=8 docs/how_to/distributed.py
    NUMBA_ENABLE_CUDASIM=1 torchrun --nproc_per_node=2 docs/how_to/distributed.py --size 24
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from numba_gemm.distributed import distributed_sgemm, explain

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--size", type=int, default=16384, help="rows and columns of A, B and C")
parser.add_argument("--precision", default="ieee")
options = parser.parse_args()

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    device = "cpu"
    dist.init_process_group("gloo")
else:
    device = "cuda"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")

world, n = dist.get_world_size(), options.size
mesh = init_device_mesh(device, (world,))
torch.manual_seed(dist.get_rank())
shards = [torch.randn(n // world, n, device=device) for _ in range(2)]  # world has to divide n
a, b = (DTensor.from_local(shard, mesh, [Shard(0)]) for shard in shards)
c = distributed_sgemm(a, b, precision=options.precision)

row = a.full_tensor()[:1].double() @ b.full_tensor().double()
error = float((c.full_tensor()[:1] - row).abs().max())
if dist.get_rank() == 0:
    print(explain(n, n, n, mesh=world, precision=options.precision))
    print(f"Largest error in the first row: {error:.1e}")
dist.destroy_process_group()
