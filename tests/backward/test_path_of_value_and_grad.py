"""The path of `jdp.value_and_grad`: how many files must be opened to follow it?

Counted are the files of jdp with at least one function that Python calls while
`jdp.value_and_grad(loss)` is made and its call is traced once: default options, two
parameters, and a loss without batch norm, collectives and custom rules. Files of which
only constants, types or unused functions are imported are not counted.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp

import jdp
from jdp.replicas import mesh

ROOT = pathlib.Path(jdp.__file__).parent
PARAMS = {"w": jnp.ones((3, 3)), "b": jnp.ones(3)}
# Four lie in gradients/, four in backward/. In three of the others, the axis and the
# reduction of the world are found, in one, modules of nnx are refused, and in one, the
# buckets get their names.
NUM_FILES = 16


def _loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


def _files_entered(fn, *args):
    entered = set()

    def profile(frame, event, arg):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            entered.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        jax.make_jaxpr(fn)(*args)
    finally:
        sys.setprofile(before)
    return entered


def test_few_files_are_enough_to_follow_value_and_grad(monkeypatch):
    # Other tests may have imported Flax, whose batch norm and objects jdp looks for,
    # and may have left a world.
    for name in ("flax", "flax.nnx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(mesh._CurrentWorld, "world", None)
    step = jax.vmap(
        lambda params, x: jdp.value_and_grad(_loss)(params, x),
        in_axes=(None, 0),
        axis_name="data",
    )
    jax.make_jaxpr(step)(PARAMS, jnp.ones((4, 1, 3)))  # Modules are imported lazily.
    entered = _files_entered(step, PARAMS, jnp.ones((4, 2, 3)))
    assert "gradients/differentiation.py" in entered
    assert len(entered) <= NUM_FILES, sorted(entered)
