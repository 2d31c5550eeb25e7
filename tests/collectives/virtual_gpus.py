"""The programs of several GPUs, run on one: n streams play n devices.

A kernel over `RemotePeers` needs nothing of a second GPU but addresses. XLA gives them
as collective metadata, an array of int64: [rank, 0, 0, 0, the first parameter on each
peer, the second one on each peer, ...]. So n launches of the same machine code, each
with its own metadata, on n streams of one GPU run what n GPUs would: addresses,
counters, fences. NVLink is missing, and XLA's barrier before the launch.

    python -m tests.collectives.virtual_gpus compile FOLDER  # needs ptxas, and no GPU
    CUDA_DEVICE_MAX_CONNECTIONS=32 \
    python -m tests.collectives.virtual_gpus run FOLDER --json rows.jsonl  # needs CuPy

All blocks of all launches have to be resident at once, and each stream has its own
hardware queue: launches that share one would wait for each other for ever.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import numpy as np

CASES = list(
    itertools.product(
        ("one_stage", "two_stage"),
        (2, 4, 6, 8),
        ("float32", "bfloat16"),
        (4096, 1 << 16, (1 << 16) + 8, 1 << 20),
    )
)
_NUM_MULTIPROCESSORS = 128  # of an H100, rounded down.
_ALIGNMENT = 256  # bytes, of every buffer that XLA gives to a kernel.


def find_arguments(log: str) -> list[int]:
    """Returns the buffer of the custom call that each parameter of the kernel is.

    Args:
      log: the passes of Mosaic, from `MOSAIC_GPU_DUMP_MLIR_PASSES`.
    """
    start = log.rindex("gpu.launch_func")
    body = log[:start]
    body = body[body.rindex("func @") :]
    line = log[start:].split("\n", 1)[0]
    names = re.findall(r"(%[\w.]+) : !llvm.ptr", line[line.index("args(") :])
    index = dict(
        re.findall(r"(%[\w.]+) = llvm.getelementptr %mpmd_map3A_0\[(\d+)\]", body)
    )
    loads = dict(
        re.findall(r"(%[\w.]+) = llvm.load (%[\w.]+) : !llvm.ptr -> !llvm.ptr", body)
    )
    return [int(index.get(loads[name], 0)) for name in names]


def compile_all(folder: pathlib.Path, ptxas: str) -> None:
    """Compiles all cases for an H100; writes machine code and `cases.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_MLIR_PASSES": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
    }
    from tests.collectives import kernels_for_cuda

    devices = kernels_for_cuda.absent_gpus()
    rows = [_compile_one(case, folder, devices, ptxas) for case in CASES]
    (folder / "cases.json").write_text(json.dumps(rows, indent=1))


def _compile_one(case, folder, devices, ptxas):
    import jax
    import jax.numpy as jnp

    from jdp.collectives.pallas import choice, kernel_launch
    from tests.collectives import kernels_for_cuda

    algorithm, n, dtype, size = case
    num_bytes = size * jnp.dtype(dtype).itemsize
    launch = choice.default_launch(
        num_bytes, n, algorithm, max_blocks=_NUM_MULTIPROCESSORS // n
    )
    mesh = jax.sharding.Mesh(devices[:n], [kernels_for_cuda.AXIS])
    before = set(folder.glob("*.ptx"))
    kernels_for_cuda.compile_on_replicas(mesh, size, dtype, algorithm, launch)
    (ptx,) = set(folder.glob("*.ptx")) - before
    log = ptx.with_suffix(".mlir-passes.log")
    order = find_arguments(log.read_text())
    log.unlink()
    # The newest version that is known to the drivers of CUDA 13.0.
    text = re.sub(r"^\.version .*", ".version 9.0", ptx.read_text(), flags=re.M)
    ptx.write_text(text)
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", ptx, "-o", cubin], check=True)
    ptx.unlink()
    tiling = kernel_launch.make_tiling(size, dtype, n, algorithm, launch)
    return {
        "algorithm": algorithm,
        "num_replicas": n,
        "dtype": dtype,
        "size": size,
        "padded": tiling.size,
        "part_size": tiling.part_size,
        "num_blocks": tiling.num_blocks,
        "num_warpgroups": tiling.num_warpgroups,
        "order": order,
        "entry": re.search(r"\.entry (\w+)", text)[1],
        "cubin": cubin.name,
    }


class Replicas:
    """The buffers of all replicas of a case, on one GPU."""

    def __init__(self, case, folder):
        """Loads the kernel, and writes the metadata of each replica."""
        import cupy as cp

        self.case, self._cp = case, cp
        module = cp.RawModule(path=str(folder / case["cubin"]))
        self._kernel = module.get_function(case["entry"])
        n, itemsize = case["num_replicas"], 4 if case["dtype"] == "float32" else 2
        self._n, self._itemsize = n, itemsize
        self._width = case["padded"] * itemsize
        num_counters = case["num_blocks"] * case["num_warpgroups"]
        self.x, self.y = self._rows(self._width), self._rows(self._width)
        self.part = self._rows(case["part_size"] * itemsize)
        self.counters = self._rows(4 * num_counters)
        has_part = case["algorithm"] == "two_stage"
        # The buffers of the call in their order; the counters are aliased.
        parts = [self.part] if has_part else []
        self._buffers = [self.x, self.counters, self.y, *parts, self.counters]
        count = 4 + (n + 1) * len(self._buffers)
        metadata = np.zeros((n, _round_up(8 * count) // 8), np.int64)
        for rank in range(n):
            metadata[rank, 0] = rank
            for i, rows in enumerate(self._buffers):
                pointers = [rows[peer].data.ptr for peer in range(n)]
                metadata[rank, 4 + n * i : 4 + n * (i + 1)] = pointers
        self._metadata = cp.asarray(metadata)
        self._streams = [cp.cuda.Stream(non_blocking=True) for _ in range(n)]

    def _rows(self, num_bytes):
        return self._cp.zeros((self._n, _round_up(num_bytes)), self._cp.uint8)

    def count_wrong(self):
        """Reduces new random numbers; returns how many elements are wrong."""
        cp, case, width = self._cp, self.case, self._width
        shape = (self._n, case["padded"])
        values = cp.random.randint(-8, 9, shape).astype(cp.float32)
        bits = values.view(cp.uint32)
        if self._itemsize == 2:  # bfloat16: exact for such small numbers.
            bits = (bits >> 16).astype(cp.uint16)
        self.x[:, :width] = bits.view(cp.uint8).reshape(self._n, width)
        self.y.fill(0xFF)  # NaN, were it not written.
        self.part.fill(0xFF)
        self.counters.fill(0)
        cp.cuda.Device().synchronize()  # XLA's barrier at the start.
        self._launch()
        cp.cuda.Device().synchronize()
        found = cp.ascontiguousarray(self.y[:, :width])
        if self._itemsize == 4:
            found = found.view(cp.float32)
        else:
            wide = found.view(cp.uint16).astype(cp.uint32) << 16
            found = wide.view(cp.float32)
        differ = found[:, : case["size"]] != values.sum(0)[: case["size"]]
        return int(differ.sum())

    def _launch(self):
        grid = (self.case["num_blocks"],)
        block = (128 * self.case["num_warpgroups"],)
        for rank, stream in enumerate(self._streams):
            pointers = [rows[rank].data.ptr for rows in self._buffers]
            pointers.append(self._metadata[rank].data.ptr)
            arguments = tuple(np.uint64(pointers[k]) for k in self.case["order"])
            with stream:
                self._kernel(grid, block, arguments)


def _round_up(num_bytes):
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def run_all(folder, repeats, rows):
    """Runs all cases; returns how many elements were wrong."""
    wrong = 0
    for case in json.loads((folder / "cases.json").read_text()):
        if rows.is_late:
            break
        start_s = time.monotonic()
        replicas = Replicas(case, folder)
        found = sum(replicas.count_wrong() for _ in range(repeats))
        wrong += found
        kept = {k: v for k, v in case.items() if k not in ("order", "entry", "cubin")}
        seconds = time.monotonic() - start_s
        rows.add(kept | {"repeats": repeats, "wrong": found, "seconds": seconds})
    return wrong


def main():
    """Compiles or runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("compile", "run"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ptxas", default="ptxas")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--limit-s", type=float, default=240.0)
    arguments = parser.parse_args()
    if arguments.what == "compile":
        compile_all(arguments.folder, arguments.ptxas)
        return
    from jdp.bench.rows import Rows

    rows = Rows(arguments.json, arguments.limit_s)
    wrong = run_all(arguments.folder, arguments.repeats, rows)
    bad = [row for row in rows.written if row["wrong"]]
    print(
        f"{len(rows.written)} of {len(CASES)} programs of several GPUs on one, "
        f"{arguments.repeats} repeats each, {len(bad)} wrong"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
