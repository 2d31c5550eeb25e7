"""The kernels of the custom all-reduce, lowered and compiled without a GPU.

As a program it compiles all of `CASES` with the CUDA plug-in of JAX and ptxas, and
prints a line of JSON for each.
"""

import collections
import glob
import itertools
import json
import os
import pathlib
import re
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives.pallas import choice, kernel_launch

AXIS = "data"


class Case(NamedTuple):
    """A kernel."""

    peers: str  # "replicas", "cluster" or "alone"
    algorithm: choice.Algorithm
    n: int
    dtype: str
    size: int

    @property
    def launch(self):
        num_bytes = self.size * jnp.dtype(self.dtype).itemsize
        return choice.default_launch(
            num_bytes, self.n, self.algorithm, max_blocks=choice.MAX_BLOCKS
        )


CASES = [
    Case(*each)
    for each in itertools.product(
        ("replicas", "cluster", "alone"),
        ("one_stage", "two_stage", "multimem"),
        (2, 4, 6, 8),
        ("float32", "bfloat16", "float16"),
        (1 << 20, (1 << 20) + 8),
    )
    # What the switch reduces is float32, of GPUs, and padded to whole tiles.
    if each[1] != "multimem"
    or each[::3] == ("replicas", "float32")
    and each[4] == 1 << 20
]


def make(case):
    """Returns the function of a case, and the types of its arguments."""
    xs = jax.ShapeDtypeStruct((case.n, case.size), case.dtype)
    if case.peers == "cluster":
        return (
            lambda xs: kernel_launch.all_reduce_in_cluster(
                xs, case.algorithm, case.launch, 0.5
            ),
            [xs],
        )
    if case.peers == "alone":
        kernel = kernel_launch.all_reduce_alone(
            case.n, case.size, case.dtype, case.algorithm, case.launch
        )
        parts = jax.ShapeDtypeStruct(kernel.part_shape, case.dtype)
        avals = [xs, parts] if case.algorithm == "two_stage" else [xs]
        return lambda xs, parts=None: kernel.run(xs, parts), avals
    mesh = _abstract_mesh(case.n)
    return _on_replicas(case, mesh), [_split(xs, mesh)]


def _on_replicas(case, mesh):
    def run(xs):
        scale = jnp.full((1,), 0.5)
        return kernel_launch.all_reduce_on_replicas(
            xs[0], AXIS, case.n, case.algorithm, case.launch, scale
        )[None]

    return jax.shard_map(run, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))


def lower_on_replicas(fn, n, avals):
    """Returns the text of `fn`, lowered for CUDA.

    Its argument has a row for each replica, and its result is the same on all of them.
    """
    mesh = _abstract_mesh(n)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    avals = jax.tree.map(lambda aval: _split(aval, mesh), avals)
    return jax.jit(mapped).trace(avals).lower(lowering_platforms=("cuda",)).as_text()


def _abstract_mesh(n):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((n,), (AXIS,), axis_types=auto)


def _split(aval, mesh):
    sharding = jax.sharding.NamedSharding(mesh, P(AXIS))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def least_vectors(case):
    """How many loads and stores of 16 bytes the shortest code of a kernel has."""
    if case.algorithm == "multimem":
        return 2  # one of the switch, and one to it.
    loads = case.n * case.launch.unroll
    stores = case.launch.unroll
    if case.algorithm == "two_stage":
        return 2 * loads + stores + loads
    return loads + stores


def main():
    """Compiles all cases for an H100, 8 of which are taken to be here."""
    dump = pathlib.Path(tempfile.mkdtemp(prefix="jdp-ptx-"))
    os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    devices = absent_gpus()
    for case in CASES:
        before = set(glob.glob(f"{dump}/*.ptx"))
        _compile(case, devices)
        written = set(glob.glob(f"{dump}/*.ptx")) - before
        (path,) = map(pathlib.Path, written)
        print(json.dumps({"kind": "kernel", "case": case, **_read(path)}), flush=True)
    print(json.dumps({"kind": "graph", "thunks": _record(devices, dump)}))
    print(json.dumps({"kind": "aligned buffer", **_look_at_copies(devices, [1 << 20])}))
    print(json.dumps({"kind": "bucket", **_look_at_copies(devices, [1000, 99_999, 7])}))


def absent_gpus():
    """Returns 8 devices to compile for: H100s of one host, none of which is here."""
    from jax.experimental import topologies

    target = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x8"
    ).devices


def compile_on_replicas(mesh, size, dtype, algorithm, launch):
    """Compiles the kernel of a mesh for buffers of `size` elements."""

    def run(xs):
        return kernel_launch.all_reduce_on_replicas(
            xs[0], AXIS, mesh.size, algorithm, launch
        )[None]

    fn = jax.shard_map(run, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    xs = _split(jax.ShapeDtypeStruct((mesh.size, size), dtype), mesh)
    return jax.jit(fn).lower(xs).compile()


def _compile(case, devices):
    if case.peers == "replicas":
        mesh = jax.sharding.Mesh(devices[: case.n], [AXIS])
        fn = _on_replicas(case, mesh)
        avals = [_split(jax.ShapeDtypeStruct((case.n, case.size), case.dtype), mesh)]
    else:
        fn, avals = make(case)
        one = jax.sharding.SingleDeviceSharding(devices[0])
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one) for a in avals]
    return jax.jit(fn).lower(*avals).compile()


def _read(path):
    ptx = path.read_text()
    accesses = re.findall(r"\b(?:ld|st|multimem)\.[a-z0-9_.:]+", ptx)
    signals = re.findall(r"\b(?:(?:multimem\.)?red|atom)\.[a-z0-9_.:]+", ptx)
    fences = re.findall(r"\b(?:fence|membar)\.[a-z0-9_.:]+", ptx)
    steps = re.findall(
        r"\b(bar\.sync|red\.release|ld\.relaxed|fence\.acquire|ld\.global|st\.global)\b",
        ptx,
    )
    assembler = pathlib.Path(f"{path}as").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", assembler)
    return {
        "accesses": collections.Counter(accesses),
        "signals": collections.Counter(signals),
        "fences": collections.Counter(fences),
        "barriers": steps.count("bar.sync"),
        "meetings": [
            steps[i - 1 : i + 4]
            for i, step in enumerate(steps)
            if step == "red.release"
        ],
        "registers": int(registers),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", assembler))),
    }


def _record(devices, dump):
    """Compiles work around a kernel with CUDA graphs; what the program launches."""
    case = Case("replicas", "two_stage", 4, "float32", 1 << 18)
    mesh = jax.sharding.Mesh(devices[: case.n], [AXIS])
    kernel = _on_replicas(case, mesh)
    xs = _split(jax.ShapeDtypeStruct((case.n, case.size), case.dtype), mesh)
    options = {
        "xla_dump_to": str(dump / "graph"),
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    }
    program = jax.jit(lambda xs: jnp.cos(kernel(jnp.sin(xs))))
    program.lower(xs).compile(compiler_options=options)
    (path,) = (dump / "graph").glob("*thunk_sequence_after_thunk_passes.txt")
    return path.read_text().splitlines()


def _look_at_copies(devices, sizes):
    """Compiles gradients of those sizes, one bucket, as a step would reduce them."""
    n = 4
    mesh = jax.sharding.Mesh(devices[:n], [AXIS])

    def sync(tree):
        local = {name: x[0] for name, x in tree.items()}
        return jdp.sync_gradients(
            local, axis_name=AXIS, all_reduce=jdp.collectives.pallas_all_reduce
        )

    mapped = jax.shard_map(sync, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    avals = {
        f"p{i}": _split(jax.ShapeDtypeStruct((n, size), jnp.float32), mesh)
        for i, size in enumerate(sizes)
    }
    text = jax.jit(mapped).lower(avals).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    (call,) = re.findall(r"custom-call\((%[\w.-]+)", entry)
    return {
        "copies": re.findall(r"%copy[\w.-]* = .*", entry),
        "writers_of_the_bucket": len(
            re.findall(rf"{re.escape(call)} = .*fusion", entry)
        ),
    }


if __name__ == "__main__":
    main()
