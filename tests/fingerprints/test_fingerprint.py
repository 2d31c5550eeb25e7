"""Fingerprints: equal on equal bits, and only then, however the arrays are cut."""

import math
import os
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from jdp.fingerprints import fingerprint
from tests import harness, rarely

DTYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
)
WIDE = ("int64", "uint64", "float64", "complex128")


def _random(dtype, shape=(6, 5), seed=0):
    """An array of random bits, NaNs included."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype.name == "bool":
        return rng.random(shape) < 0.5
    if "int4" in dtype.name:
        return rng.integers(0, 8, shape).astype(dtype)
    data = rng.bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def _leaf(x, **kwargs):
    """The digest of an array."""
    return jdp.fingerprint_state({"x": x}, **kwargs).leaves["['x']"]


def _flip(x, index, bit):
    """The array with one bit of an element changed."""
    flipped = np.array(x)
    flipped.reshape(-1).view(np.uint8)[index * x.dtype.itemsize + bit // 8] ^= 1 << (
        bit % 8
    )
    return flipped


def _expected_lanes(words):
    """The scheme, in Python's integers."""
    lanes = [0] * 4
    for position, word in enumerate(words):
        x = (int(word) + position * 0x9E3779B9) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        x ^= x >> 16
        lanes[0] += x
        rounds = ((0xED5AD4BB, 11), (0xAC4C1B51, 15), (0x31848BAB, 14))
        for lane, (factor, shift) in enumerate(rounds, 1):
            x = x * factor % 2**32
            x ^= x >> shift
            lanes[lane] += x
    return [lane % 2**32 for lane in lanes]


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64", "complex128"])
def test_lanes_are_what_the_scheme_says(dtype):
    x = _random(dtype, (7, 3))
    found = fingerprint._sum_pieces([x])
    assert found.tolist() == [_expected_lanes(x.reshape(-1).view(np.uint32))]


def test_narrow_elements_are_one_word_each():
    x = _random("bfloat16")
    expected = _expected_lanes(x.view(np.uint16).reshape(-1))
    assert fingerprint._sum_pieces([x]).tolist() == [expected]
    four_bits = np.arange(-8, 8).astype("int4")
    expected = _expected_lanes(np.arange(-8, 8) & 15)
    assert fingerprint._sum_pieces([jnp.asarray(four_bits)]).tolist() == [expected]


def test_the_digest_of_a_small_tree_stays_from_version_to_version():
    tree = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 3}
    assert str(jdp.fingerprint_state(tree)) == GOLDEN


GOLDEN = "6fe133fa5883c25cad79810bae2a84bf"


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_jax_have_the_digests_of_arrays_of_numpy(dtype):
    x = _random(dtype)
    assert _leaf(jnp.asarray(x)) == _leaf(x)
    assert _leaf(jnp.asarray(x[0, 0])) == _leaf(np.array(x[0, 0]))
    assert _leaf(x[:, ::2]) == _leaf(np.ascontiguousarray(x[:, ::2]))


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_arrays_are_not_narrowed(dtype):
    x = _random(dtype)
    with jax.enable_x64(True):
        array = jnp.asarray(x)
        assert _leaf(array) == _leaf(x)
    assert _leaf(array) == _leaf(x) != _leaf(_flip(x, 3, 0))


@pytest.mark.parametrize("dtype", [d for d in DTYPES + WIDE if "int4" not in d])
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(st.data())
def test_a_bit_that_changes_changes_the_digest_of_its_leaf_alone(dtype, data):
    x = _random(dtype, seed=data.draw(st.integers(0, 3)))
    bits = 1 if dtype == "bool" else 8 * x.dtype.itemsize
    index = data.draw(st.integers(0, x.size - 1))
    changed = _flip(x, index, data.draw(st.integers(0, bits - 1)))
    a = jdp.fingerprint_state({"x": x, "y": x})
    b = jdp.fingerprint_state({"x": changed, "y": x})
    assert a != b and a.digest != b.digest
    assert a.leaves["['y']"] == b.leaves["['y']"]
    assert a.leaves["['x']"] != b.leaves["['x']"]
    lanes = fingerprint._sum_pieces([x]) == fingerprint._sum_pieces([changed])
    assert not lanes.any()


def test_every_single_bit_of_four_bit_integers_counts():
    values = [np.full((1,), i).astype("int4") for i in range(-8, 8)]
    assert len({_leaf(x) for x in values}) == 16
    assert len({_leaf(jnp.asarray(x)) for x in values}) == 16


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6), st.data()
)
def test_other_words_have_other_digests(words, data):
    others = data.draw(
        st.permutations(words)
        | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)
    )
    a, b = (_leaf(np.array(x, np.uint32)) for x in (words, others))
    assert (a == b) == (words == others)


def test_two_signs_that_change_do_not_cancel_out():
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    found = set()
    for i in range(64):
        for j in range(i):
            changed = x.copy()
            changed[[i, j]] *= -1
            found.add(_leaf(changed))
    assert len(found | {_leaf(x)}) == 64 * 63 // 2 + 1


def test_zeros_with_signs_and_nans_with_payloads_differ():
    for dtype, bits in (("float32", "uint32"), ("bfloat16", "uint16")):
        width = 8 * jnp.dtype(dtype).itemsize
        infinity = np.array(np.inf).astype(dtype).view(bits)
        nans = [infinity | payload for payload in (1, 2, 3)]
        values = [np.zeros((), bits), np.array(1 << (width - 1), bits), *nans]
        leaves = [_leaf(jnp.asarray(np.asarray(x).view(dtype))) for x in values]
        assert len(set(leaves)) == len(values)


def test_dtype_shape_and_path_count():
    x = np.zeros((2, 3), np.float32)
    trees = [
        {"a": x},
        {"b": x},
        [x],
        (x, x),
        x,
        {"a": x.reshape(3, 2)},
        {"a": x.reshape(6)},
        {"a": x.view(np.int32)},
        {"a": x[:0]},
        {"a": x[:, :0]},
        {"a": x, "b": None},
        {"a": x, "b": {}},
    ]
    assert len({str(jdp.fingerprint_state(tree)) for tree in trees}) == 11


def test_numbers_count_by_type_and_value():
    values = [0, 0.0, -0.0, False, 0j, None, 1, True, 1.0, 10**30, complex(0, -0.0)]
    values += [np.int32(0), np.float32(0), np.float64(0), float("nan")]
    trees = [{"x": value} for value in values]
    assert len({str(jdp.fingerprint_state(tree)) for tree in trees}) == len(values)
    assert _leaf(np.float32(2)) == _leaf(jnp.float32(2))


def test_empty_trees_have_fingerprints():
    assert jdp.fingerprint_state({}) == jdp.fingerprint_state([])
    assert jdp.fingerprint_state({}).leaves == {}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_prng_keys_count_by_data_and_kind(impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    assert _leaf(keys) == _leaf(jnp.array(keys)) != _leaf(keys[::-1])
    assert _leaf(keys) != _leaf(jax.random.key_data(keys))
    placed = jax.device_put(keys, NamedSharding(_mesh(2, 2), P("a")))
    assert _leaf(placed) == _leaf(keys)


def _mesh(a, b):
    devices = np.array(jax.devices()[: a * b]).reshape(a, b)
    return jax.sharding.Mesh(devices, ("a", "b"))


@pytest.mark.parametrize(
    "dtype",
    rarely.cases(
        ["bool", "int4", "bfloat16", "float32", "complex64"], often=["int4", "float32"]
    ),
)
def test_the_sharding_makes_no_difference(dtype):
    x = _random(dtype, (8, 4, 3))
    expected = _leaf(x)
    for spec in (P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))):
        for shape in ((2, 4), (4, 2), (1, 4)):
            mesh = _mesh(*shape)
            sizes = [
                math.prod(mesh.shape[n] for n in ([e] if isinstance(e, str) else e))
                for e in spec
                if e is not None
            ]
            if any(n % k for n, k in zip((8, 4), sizes, strict=False)):
                continue
            placed = jax.device_put(x, NamedSharding(mesh, spec))
            assert _leaf(placed) == expected, (spec, shape)


def test_arrays_on_several_meshes_and_the_host_are_one_tree():
    x = _random("float32", (8, 4))
    tree = {
        "host": x,
        "first": jax.device_put(x, jax.devices()[0]),
        "third": jax.device_put(x, jax.devices()[2]),
        "cut": jax.device_put(x, NamedSharding(_mesh(2, 2), P("a", "b"))),
        "other": jax.device_put(x, NamedSharding(_mesh(1, 4), P(None, "b"))),
        "whole": jax.device_put(x, NamedSharding(_mesh(2, 4), P())),
        "number": 3,
    }
    on_host = {name: x for name in tree} | {"number": 3}
    assert jdp.fingerprint_state(tree) == jdp.fingerprint_state(on_host)


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_the_number_of_replicas_makes_no_difference(num_replicas):
    tree = {"w": _random("float32", (3, 2)), "key": jax.random.key(0)}
    world = harness.local_world(num_replicas)
    placed = jdp.replicate(world, tree)
    assert jdp.fingerprint_state(placed) == jdp.fingerprint_state(tree)


def test_the_result_is_the_same_without_the_optimizations_of_xla():
    x = _random("float32", (40, 7))
    (found,) = fingerprint._sum_pieces([jnp.asarray(x)]).tolist()
    code = """
import jax.numpy as jnp, numpy as np, sys
from jdp.fingerprints import fingerprint
x = np.frombuffer(bytes.fromhex(sys.stdin.read()), np.float32).reshape(40, 7)
print(*fingerprint._sum_pieces([jnp.asarray(x)])[0])
"""
    assert _run(code, x.tobytes().hex()).split() == [str(lane) for lane in found]


def _run(code, text=""):
    """What a program prints; XLA compiles it as for a user."""
    environ = {**os.environ, "PYTHONPATH": harness.python_path(), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", code]
    out = subprocess.run(
        command, input=text, env=environ, stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert out.returncode == 0
    return out.stdout


@pytest.mark.slow
def test_a_fingerprint_takes_less_than_half_of_the_time_of_a_cryptographic_hash():
    """A fifth here, and more on a busy machine: it finds hashing on the host."""
    code = """
import hashlib, time
import jax.numpy as jnp, numpy as np, jdp
def least_cpu_s(fn):
    times = []
    for _ in range(10):
        start_s = time.process_time()
        fn()
        times.append(time.process_time() - start_s)
    return min(times)
block = [(256, 256), (256,), (256,)]
tree = [jnp.ones(shape) for _ in range(48) for shape in block]
data = np.ones(sum(x.size for x in tree), np.float32)
jdp.fingerprint_state(tree)
print(least_cpu_s(lambda: jdp.fingerprint_state(tree)))
print(least_cpu_s(lambda: hashlib.blake2b(data).digest()))
"""
    ours, theirs = map(float, _run(code).split())
    assert ours < theirs / 2


@pytest.mark.parametrize(
    "leaf, says",
    [
        ("text", "`['x']` is a str, and must be an array"),
        (
            np.array(["a"]),
            "`['x']` is an array of NumPy of dtype <U1, and must be an array",
        ),
        (np.array([None]), "`['x']` is an array of NumPy of dtype object"),
        (np.zeros(2, np.longdouble), "an array of NumPy of dtype float128"),
        (np.zeros(2, [("a", "f4")]), "an array of NumPy of dtype [('a', '<f4')]"),
        (np.zeros(2, "M8[s]"), "an array of NumPy of dtype datetime64[s]"),
        (np.zeros(2, ">f4"), "in the byte order of this machine"),
        (np.ma.masked_array([1.0], [True]), "mask"),
        (jax.ShapeDtypeStruct((2,), np.float32), "`['x']` is a ShapeDtypeStruct"),
    ],
)
def test_other_leaves_are_refused_by_path(leaf, says):
    with pytest.raises(TypeError) as caught:
        jdp.fingerprint_state({"x": leaf})
    assert says in str(caught.value)


def test_traced_and_deleted_arrays_are_refused_by_path():
    with pytest.raises(TypeError, match="`\\['x'\\]` is traced by JAX"):
        jax.jit(lambda x: [jdp.fingerprint_state({"x": x})])(1.0)
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(RuntimeError, match="`\\['x'\\]` was donated to a step or"):
        jdp.fingerprint_state({"x": x})


# --- Several processes ---------------------------------------------------------


def test_lanes_of_processes_add_up():
    x = _random("float32", (4, 3))
    whole = fingerprint._sum_pieces([x])
    rows = [np.uint32(whole // 3), whole - 2 * np.uint32(whole // 3)]

    def run(world):
        mine = rows[world.process_index == 2]
        return fingerprint._add_over_processes(world, [("x", "float32[4,3]")], mine)

    for found in harness.run_threads(run, 3):
        np.testing.assert_array_equal(found, whole)


def test_processes_with_other_trees_all_raise():
    def run(world):
        heads = [("x" if world.process_index < 2 else "y", "float32[4]")]
        return fingerprint._add_over_processes(world, heads, np.zeros((1, 4), "u4"))

    for error in harness.run_threads(run, 3):
        assert isinstance(error, RuntimeError)
        assert "Processes 0 and 2 have trees with other arrays" in str(error)


def _fingerprint_in_processes():
    world = jdp.init()
    x = _random("float32", (8, 4))
    n = world.num_replicas
    cut = NamedSharding(world.mesh, P(None, "data"))
    tree = {
        "host": x,
        "whole": jdp.replicate(world, x),
        "rows": jax.make_array_from_callback(x.shape, world.split, lambda at: x[at]),
        "columns": jax.make_array_from_callback(x.shape, cut, lambda at: x[at]),
    }
    found = jdp.fingerprint_state(tree)
    alone = jdp.fingerprint_state({name: tree[name] for name in ("host", "whole")})
    return n, found, alone == jdp.fingerprint_state({"host": x, "whole": x})


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes, num_devices", [(2, 1), (2, 2)])
def test_arrays_that_are_cut_among_processes(num_processes, num_devices):
    found = harness.run_checked(
        _fingerprint_in_processes, num_processes, devices_per_process=num_devices
    )
    x = _random("float32", (8, 4))
    expected = jdp.fingerprint_state(
        dict.fromkeys(("host", "whole", "rows", "columns"), x)
    )
    assert found == [(num_processes * num_devices, expected, True)] * num_processes
