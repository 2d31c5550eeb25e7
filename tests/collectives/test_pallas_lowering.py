"""What the custom all-reduce is lowered to for CUDA, on a machine without a GPU."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jdp
from jdp.collectives import PallasAllReduce, pallas_all_reduce
from jdp.collectives.pallas import kernel_launch
from tests import rarely
from tests.collectives import kernels_for_cuda
from tests.collectives.kernels_for_cuda import Case

DTYPES = ("float32", "bfloat16", "float16")
KERNELS = [
    *itertools.product(("replicas", "cluster", "alone"), ("one_stage", "two_stage")),
    ("replicas", "multimem"),
]


def _lower(case):
    fn, avals = kernels_for_cuda.make(case)
    return jax.jit(fn).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("n", rarely.cases([2, 4, 6, 8], often=(6,)))
@pytest.mark.parametrize(
    ("peers", "algorithm"), rarely.cases(KERNELS, often=KERNELS[::3] + KERNELS[4:5])
)
def test_every_kernel_is_lowered_for_cuda(peers, algorithm, n):
    for dtype, size in itertools.product(DTYPES, (1 << 18, (1 << 18) + 8)):
        text = _lower(Case(peers, algorithm, n, dtype, size))
        assert "mosaic_gpu_v2" in text
        has_metadata = "uses_xla_collective_metadata = true" in text
        assert has_metadata == (peers == "replicas")


@pytest.mark.parametrize("names", [("node", "data"), ("data", "node"), ("model",)])
def test_some_axes_of_a_mesh_are_lowered_for_cuda(names):
    sizes = {"node": 2, "model": 2, "data": 2}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), auto)
    sharding = jax.sharding.NamedSharding(mesh, P(tuple(sizes)))
    aval = jax.ShapeDtypeStruct((8 * 1024,), jnp.float32, sharding=sharding)
    for algorithm in ("one_stage", "two_stage"):
        mapped = jax.shard_map(
            lambda x, a=algorithm: PallasAllReduce(a)(x, names),
            mesh=mesh,
            in_specs=P(tuple(sizes)),
            out_specs=P(tuple(n for n in sizes if n not in names)),
        )
        lowered = jax.jit(mapped).trace(aval).lower(lowering_platforms=("cuda",))
        assert "uses_xla_collective_metadata = true" in lowered.as_text()


@pytest.mark.parametrize(("num_cores", "expected"), [(132, 66), (78, 39), (None, 66)])
def test_a_launch_takes_half_of_the_multiprocessors_of_the_device(
    monkeypatch, num_cores, expected
):
    launches = []
    run = kernel_launch.all_reduce_on_replicas

    def spy(x, axis_name, num_replicas, algorithm, launch, scale):
        launches.append(launch)
        return run(x, axis_name, num_replicas, algorithm, launch, scale)

    monkeypatch.setattr(kernel_launch, "all_reduce_on_replicas", spy)
    mesh = jax.sharding.AbstractMesh(
        (2,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind="a GPU", num_cores=num_cores, platform="gpu"
        ),
    )
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    mapped = jax.shard_map(
        lambda x: pallas_all_reduce(x, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    aval = jax.ShapeDtypeStruct((4 << 20,), jnp.float32, sharding=sharding)
    jax.jit(mapped).trace(aval)
    assert [launch.num_blocks for launch in launches] == [expected]


def test_an_aligned_buffer_is_not_padded_and_others_are():
    for size, is_padded in ((1 << 18, False), ((1 << 18) + 4, False), (100_003, True)):
        text = _lower(Case("replicas", "two_stage", 4, "float32", size))
        assert ("stablehlo.pad" in text) == is_padded, size


def test_a_mean_is_taken_inside_of_the_kernel():
    grads = {"w": jax.ShapeDtypeStruct((4, 1024), jnp.float32)}

    def sync(g):
        local = jax.tree.map(lambda x: x[0], g)
        return jdp.sync_gradients(local, all_reduce=pallas_all_reduce)

    text = kernels_for_cuda.lower_on_replicas(sync, 4, grads)
    assert "jdp_one_stage_all_reduce" in text
    assert "stablehlo.divide" not in text and "stablehlo.multiply" not in text
    assert "all_reduce" not in text.replace("jdp_one_stage_all_reduce", "")


def test_the_result_is_the_same_on_all_replicas_by_its_type():
    # Out of a `shard_map` with `out_specs=P()` nothing else is let.
    kernels_for_cuda.lower_on_replicas(
        lambda x: pallas_all_reduce(x[0], "data"),
        2,
        jax.ShapeDtypeStruct((2, 1024), jnp.float32),
    )


def _trace(all_reduce, n, shape=(1024,), dtype=jnp.float32, **options):
    aval = jax.ShapeDtypeStruct((n, *shape), dtype)
    return kernels_for_cuda.lower_on_replicas(
        lambda x: all_reduce(x[0], "data", **options), n, aval
    )


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            TypeError,
            "takes float32, bfloat16, float16, got int32",
            {"dtype": jnp.int32},
        ),
        (ValueError, "takes 2, 4, 6, 8 replicas, got 3", {"n": 3}),
        (ValueError, "takes 2, 4, 6, 8 replicas, got 16", {"n": 16}),
        (ValueError, "at most 8388608 bytes of 4", {"shape": (2 << 20 | 1,)}),
        (ValueError, "must be a flat buffer", {"shape": (8, 8)}),
        (ValueError, "'sum' or 'mean', got 'max'", {"op": "max"}),
        (ValueError, "not both", {"op": "mean", "scale": 2.0}),
        (ValueError, "`scale` must be a scalar", {"scale": jnp.ones(2)}),
    ],
)
def test_called_directly_it_names_the_limit(error, message, arguments):
    with pytest.raises(error, match=message):
        _trace(pallas_all_reduce, **{"n": 4} | arguments)


def test_another_algorithm_is_refused():
    with pytest.raises(ValueError, match="must be one_stage.*got 'two-stage'"):
        PallasAllReduce("two-stage")


def test_the_switch_reduces_float32_alone():
    with pytest.raises(TypeError, match="takes float32, got bfloat16"):
        _trace(PallasAllReduce("multimem"), 4, dtype=jnp.bfloat16)


def test_another_platform_is_refused_when_it_is_compiled_for():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.jit(
        jax.shard_map(
            lambda x: pallas_all_reduce(x, "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )
    with pytest.raises(NotImplementedError, match="this is compiled for cpu"):
        run(jnp.ones(2048))


def test_under_vmap_it_says_where_it_runs():
    with pytest.raises(ValueError, match="runs under `shard_map`.*'data'"):
        jax.vmap(lambda x: pallas_all_reduce(x, "data"), axis_name="data")(
            jnp.ones((2, 1024))
        )


def test_one_replica_and_no_elements_need_no_kernel():
    text = _trace(pallas_all_reduce, 1, scale=0.5)
    assert "mosaic" not in text and "multiply" in text
    assert "mosaic" not in _trace(pallas_all_reduce, 4, shape=(0,))


# --- With the compiler: make test-ptx -----------------------------------------------


@pytest.fixture(scope="module")
def compiled():
    """What `kernels_for_cuda` found, by case."""
    command = [sys.executable, "-m", "tests.collectives.kernels_for_cuda"]
    # XLA finds no compiler for GPUs that are not there while it looks for them.
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


_NO_DATA = ("ld.param", "ld.relaxed", "multimem.red")  # arguments and signals.


@pytest.mark.ptx
@pytest.mark.timeout(600)
def test_peers_are_read_16_bytes_at_a_time_and_nothing_spills(compiled):
    kernels = [found for found in compiled if found["kind"] == "kernel"]
    assert len(kernels) == len(kernels_for_cuda.CASES)
    for found in kernels:
        case, accesses = Case(*found["case"]), found["accesses"]
        vectors = sum(count for name, count in accesses.items() if ".v4." in name)
        assert vectors >= kernels_for_cuda.least_vectors(case), found
        others = {
            name: count
            for name, count in accesses.items()
            if ".v4." not in name and not name.startswith(_NO_DATA)
        }
        if case.peers == "replicas":
            # The addresses of peers, the scale, and which device this is.
            others.pop("ld.global.b64")
            others.pop("ld.global.v2.b64", None)
            assert others.pop("ld.global.b32", 0) <= 4, found
        assert not others, found
        assert found["spilled_bytes"] == 0, found
        # A block of 512 threads must fit into the 65536 registers beside nothing else.
        assert found["registers"] <= 128, found


_BARRIERS_AT_THE_START = 2  # JAX's own.


@pytest.mark.ptx
def test_a_meeting_takes_one_fence_and_one_atomic_of_any_number_of_peers(compiled):
    """A fence of the whole system takes about 1 us on an H100, one after another.

    A release is a fence of its own: ptxas puts a MEMBAR before the atomic.
    """
    for found in compiled:
        if found["kind"] != "kernel":
            continue
        case = Case(*found["case"])
        meetings = 2 if case.algorithm == "two_stage" else 1
        if case.algorithm == "multimem":
            signals = {"multimem.red.release.sys.global.add.u32": 1}
            fences = {"fence.proxy.alias": 1, "fence.acquire.sys": 1}
        else:
            signals = {"red.release.sys.global.add.u32": meetings}
            fences = {"fence.acquire.sys": meetings}
            # The signal comes after what all threads did, and their next steps after
            # the signals of all; nowhere else do they wait for each other.
            steps = [
                "bar.sync",
                "red.release",
                "ld.relaxed",
                "fence.acquire",
                "bar.sync",
            ]
            assert found["meetings"] == [steps] * meetings, found
            assert found["barriers"] == _BARRIERS_AT_THE_START + 2 * meetings, found
        wide = {k: v for k, v in found["fences"].items() if not k.endswith(".cluster")}
        assert found["signals"] == signals, found
        assert wide == fences, found


@pytest.mark.ptx
def test_buffers_that_fit_are_not_copied(compiled):
    (found,) = (found for found in compiled if found["kind"] == "aligned buffer")
    assert found["copies"] == []
    (found,) = (found for found in compiled if found["kind"] == "bucket")
    # One fusion writes the bucket, padded; nothing but the kernel reads it.
    assert found["copies"] == [] and found["writers_of_the_bucket"] == 1


@pytest.mark.ptx
def test_command_buffers_record_the_kernel(compiled):
    """A CUDA graph holds what stands indented under it."""
    (found,) = (found for found in compiled if found["kind"] == "graph")
    kernel_at = next(i for i, t in enumerate(found["thunks"]) if "kCustomCall" in t)
    graphs = [i for i, t in enumerate(found["thunks"]) if "kCommandBuffer" in t]
    if jax.__version_info__ >= (0, 12):
        assert graphs == [0] and found["thunks"][kernel_at].startswith("    ")
    else:  # One graph before the kernel, and one after it.
        assert len(graphs) == 2 and graphs[0] < kernel_at < graphs[1]
