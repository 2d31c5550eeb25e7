"""Page blocks: the code blocks of README and docs, with the context they leave out.

`python -m tests.page_blocks` runs the fragments on two virtual devices.
"""

import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

from tests import harness

PAGES = ("README.md", *(f"docs/{p.name}" for p in harness.ROOT.glob("docs/*.md")))


class Block(NamedTuple):
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str


class Fragment(NamedTuple):
    """A Python block that needs what its page says around it."""

    before: str = ""
    after: str = ""
    is_traced: bool = False  # runs inside of a step.


SCRIPT = "a program of its own"

_ADAM_STEP = "state, metrics = step((params, tx.init(params)), batch)"
_LOOP = """
                import pathlib

                tx = optax.adam(1e-2)
                opt_state = tx.init(params)

                @jdp.data_parallel(num_states=2)
                def step(params, opt_state, batch):
                    loss, grads = jdp.value_and_grad(loss_fn)(params, batch)
                    updates, opt_state = tx.update(grads, opt_state, params)
                    return optax.apply_updates(params, updates), opt_state, loss

                params, opt_state = jdp.replicate(world, (params, opt_state))
                """

_STEP = """
                @jdp.data_parallel
                def step(params, batch):
                    loss, grads = jdp.value_and_grad(loss_fn)(params, batch)
                    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
                    return params, {"loss": loss}

                """

# By page, its Python blocks in order.
PYTHON: dict[str, list[Fragment | str]] = {
    "README.md": [SCRIPT, Fragment(after=_ADAM_STEP), SCRIPT],
    "docs/batch_norm.md": [
        SCRIPT,
        Fragment(
            before="""
                from flax import nnx
                import jdp.flax_nnx

                class Net(nnx.Module):
                    def __init__(self, rngs):
                        self.dense = nnx.Linear(4, 3, rngs=rngs)
                        self.norm = nnx.BatchNorm(3, rngs=rngs)
                        self.dropout = nnx.Dropout(0.5, rngs=rngs)

                    def __call__(self, x):
                        return self.dropout(self.norm(self.dense(x)))
                """,
            after="""
                assert model.norm.mean.shape == (3,) and model.norm.mean.sum() != 0
                assert model.dropout.rngs.count[...] == 1 and metrics["loss"] > 0
                """,
        ),
        Fragment(
            before="""
                import flax.linen as nn
                import jdp.flax_linen

                class Net(nn.Module):
                    @nn.compact
                    def __call__(self, x):
                        return nn.BatchNorm(use_running_average=False)(x)

                    def encode(self, x):
                        return self(x)

                model = Net()
                variables = model.init(jax.random.key(0), x)
                """,
            after="assert y[0].shape == x.shape",
        ),
        Fragment(
            before="""
                import flax.linen as nn
                import jdp.flax_linen

                class Net(nn.Module):
                    @nn.compact
                    def __call__(self, x):
                        return nn.BatchNorm(use_running_average=False)(x)

                converted = jdp.flax_linen.convert_batch_norm(Net())
                variables = converted.init(jax.random.key(0), x)
                weight = np.array([1.0] * 7 + [0.0], np.float32)
                """,
            after="assert 'batch_stats' in updated",
        ),
    ],
    "docs/buckets.md": [
        SCRIPT,
        Fragment(
            before="params = {'layers': {'w': jnp.ones((3, 4, 4))}}", is_traced=True
        ),
    ],
    "docs/collectives.md": [
        Fragment(after="params, metrics = step(params, batch)"),
        SCRIPT,
        Fragment(is_traced=True),
    ],
    "docs/eager.md": [SCRIPT] * 9,
    "docs/eager_tracing.md": [
        Fragment(
            before="""
                from jdp import eager
                eager.init(world)
                batches = [np.ones(2)] * 3

                def step(state, batch):
                    return state + eager.all_reduce(batch, name="x"), {}

                state, _ = step(0, batches[0])
                step_, step = step, lambda state, batch: step_(state, batch)[0]
                """,
            after="""
                eager.shutdown()
                import pathlib
                assert "ALL_REDUCE" in pathlib.Path("trace.rank0.json").read_text()
                """,
        ),
        SCRIPT,
    ],
    "docs/fingerprints.md": [
        Fragment(after="params, metrics = step(params, batch)"),
        Fragment(),
        Fragment(after="assert len(str(fingerprint)) == 32"),
    ],
    "docs/flax.md": [
        Fragment(
            before="""
                from flax import nnx

                class Net(nnx.Module):
                    def __init__(self, rngs):
                        self.dense = nnx.Linear(4, 1, rngs=rngs)
                        self.dropout = nnx.Dropout(0.5, rngs=rngs)

                    def __call__(self, x):
                        return self.dense(self.dropout(x))

                model = Net(nnx.Rngs(0))
                """,
            after="assert model.dropout.rngs.count[...] == 1",
        ),
        Fragment(
            before="""
                import flax.linen as nn
                import jdp.flax_linen

                class Net(nn.Module):
                    @nn.compact
                    def __call__(self, x):
                        x = nn.BatchNorm(use_running_average=False)(x)
                        return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(x))

                net = Net()
                variables = net.init({"params": jax.random.key(0)} | dict(
                    dropout=jax.random.key(1)), x)
                """,
            after="assert metrics['scale'] == 65536 and np.isfinite(metrics['loss'])",
        ),
        Fragment(
            after="""
                x = np.arange(8, dtype=np.float32)
                _, found = step(jax.random.key(0), x)
                _, sub = jax.random.split(jax.random.key(0))
                expected = ((x + x[jax.random.permutation(sub, 8)]) ** 2).mean()
                np.testing.assert_allclose(found, expected, rtol=1e-6)
                """
        ),
    ],
    "docs/from_horovod.md": [
        Fragment(
            after="""
                state = params, tx.init(params)
                _, _, loss = step(*state, batch)
                np.testing.assert_allclose(loss, np.mean(batch["y"] ** 2), rtol=1e-5)
                """
        )
    ],
    "docs/from_pmap.md": [
        Fragment(
            before=_STEP
            + """
                state, batches = params, [batch] * 5
                """,
            after="""
                assert len([*prefetch(batches)]) == 5 and [*prefetch([])] == []
                assert all(x["x"].is_fully_addressable for x in prefetch(batches))
                assert metrics["loss"] < np.mean(batch["y"] ** 2)
                """,
        )
    ],
    "docs/getting_started.md": [SCRIPT],
    "docs/hooks.md": [SCRIPT],
    "docs/launching.md": [SCRIPT],
    "docs/local_training.md": [SCRIPT],
    "docs/micro_batches.md": [
        Fragment(after=_ADAM_STEP),
        Fragment(
            after="""
                @jdp.data_parallel
                def step(params, batch):
                    halves = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2)), batch)
                    return mean_gradients(params, halves), {}

                grads, _ = step(params, batch)
                expected = jax.grad(loss_fn)(params, batch)
                np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-5)
                """
        ),
        Fragment(
            after="""
                state = {"params": params, "noise": noise.init()}
                state, metrics = step(state, batch)
                assert np.isfinite(metrics["scale"])
                """
        ),
    ],
    "docs/replicas.md": [SCRIPT, SCRIPT],
    "docs/same_bits.md": [
        Fragment(after="params, metrics = step(params, batch)"),
        Fragment(after="params, metrics = step(params, batch, key=jax.random.key(0))"),
    ],
    "docs/steps.md": [
        Fragment(after="assert np.isfinite(metrics['loss'])"),
        Fragment(
            before="""
                schedule, i = optax.cosine_decay_schedule(0.1, 10), 3
                params = jnp.ones(4)
                """,
            after="""
                params, metrics = step(
                    params, x, rate=0.1, key=jax.random.key(0), train=False
                )
                """,
        ),
    ],
    "docs/testing.md": [SCRIPT] * 5,
    "docs/types.md": [SCRIPT],
    "docs/parameter_server.md": [SCRIPT, SCRIPT],
    "docs/training_scripts.md": [
        Fragment(
            before=_LOOP
            + """
                images, labels, batches = np.ones((150, 4)), np.ones(150), []
                step_ = step

                def step(params, opt_state, batch):
                    batches.append(batch)
                    batch = {"x": batch["image"], "y": batch["label"]}
                    return step_(params, opt_state, batch)
                """,
            after="assert [len(x['image']) for x in batches] == [64, 64] * 3",
        ),
        Fragment(
            before="""
                params = {"w": np.eye(4, 3, dtype=np.float32)}
                test = {"image": np.ones((250, 4), np.float32)}
                test["label"] = np.arange(250) % 3

                def predict(params, images):
                    return images @ params["w"]
                """,
            after="""
                assert metrics["mistakes"] == 250 - sum(test["label"] == 0)
                np.testing.assert_allclose(metrics["loss"], np.log(3), rtol=1e-5)
                """,
        ),
        Fragment(
            before=_LOOP + "folder = str(pathlib.Path('checkpoints').absolute())",
            after="""
                with ocp.CheckpointManager(folder) as manager:
                    assert manager.latest_step() == 3
                """,
        ),
        Fragment(
            after="""
                opt_state = tx.init(params)
                for _ in range(9):  # The first scales are too large.
                    _, opt_state, loss = step(params, opt_state, batch)
                np.testing.assert_allclose(loss, np.mean(batch["y"] ** 2), rtol=2e-3)
                assert opt_state.num_finite > 0
                """,
        ),
        Fragment(
            before=_LOOP,
            after="""
                new, old = params["w"], np.zeros(4)
                np.testing.assert_allclose(average["w"], 0.001 * new, rtol=1e-4)
                """,
        ),
        Fragment(after="assert schedule(50) == 0.2"),
    ],
    "docs/troubleshooting.md": [
        Fragment(
            after="""
                faulthandler.cancel_dump_traceback_later()
                assert faulthandler.unregister(signal.SIGUSR1)
                """,
        ),
        Fragment(
            before="params = jdp.replicate(world, params)",
            after="assert not np.any(jax.device_get(metrics['is_bad']))",
        ),
    ],
    "docs/unused_parameters.md": [Fragment(after=_ADAM_STEP)],
    "docs/uneven_inputs.md": [
        Fragment(
            before="""
                def predict(params, x):
                    return x @ params["w"]

                loader = [batch, {k: v[:3] for k, v in batch.items()}]
                """,
            after="assert np.isfinite(metrics['loss'])",
        ),
        Fragment(
            before=_STEP
            + """
                state, batches = jdp.replicate(world, params), [batch] * 3
                """,
            after="jdp.check_replicas(state, world=world)",
        ),
    ],
    "docs/zero1.md": [
        SCRIPT,
        Fragment(after=_ADAM_STEP),
        Fragment(
            before="""
                class checkpointer:
                    def restore(path, like):
                        return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), like)

                path, tx = "checkpoint", jdp.zero1(optax.adam(1e-2))
                state = {"params": jdp.replicate(world, params)}
                state["opt"] = jdp.replicate(world, tx.init(params))
                """,
            after="assert state['params']['w'].sum() == 4",
        ),
        Fragment(
            before="""
                adam = optax.contrib.schedule_free_adamw(1e-2)
                tx = jdp.zero1(adam)
                state = {"opt": jdp.replicate(world, tx.init(params))}
                """,
            after="assert jax.tree.leaves(state['opt'])",
        ),
    ],
}

# The names that most pages use.
PRELUDE = """
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
batch = {"x": x, "y": x.sum(axis=1)}
params = {"w": np.zeros(4, np.float32)}
"""


def find(*languages: str) -> list[Block]:
    """Returns the blocks of all pages in some languages; without one, all blocks."""
    blocks = []
    for page in PAGES:
        text = (harness.ROOT / page).read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.M):
            line = text[: match.start(2)].count("\n") + 1
            if not languages or match[1] in languages:
                blocks.append(Block(page, line, match[1], match[2]))
    return blocks


def python(page: str, index: int | None = None) -> str:
    """Returns a Python block of a page, by its number; None: all, as one program."""
    texts = [block.text for block in find("python") if block.page == page]
    return "\n".join(texts) if index is None else texts[index]


def _run(block: Block, fragment: Fragment, names: dict) -> None:
    """Runs a block as it is printed; errors show its lines in the page."""

    def run(names):
        exec(textwrap.dedent(fragment.before), names)
        # As many empty lines in front as the page has.
        code = "\n" * (block.line - 1) + block.text
        exec(compile(code, str(harness.ROOT / block.page), "exec"), names)
        exec(textwrap.dedent(fragment.after), names)

    if not fragment.is_traced:
        return run(names)

    @names["jdp"].data_parallel
    def step(params, batch):
        run(names | {"params": params, "batch": batch, "x": batch["x"]})
        return params, {}

    step(names["params"], names["batch"])


def main() -> None:
    """Runs all fragments; each begins with the prelude alone."""
    import jdp

    world = jdp.init(num_cpu_devices=2)
    indices = dict.fromkeys(PAGES, 0)
    for block in find("python"):
        fragment = PYTHON[block.page][indices[block.page]]
        indices[block.page] += 1
        if isinstance(fragment, Fragment):
            print(f"{block.page}:{block.line}", flush=True)
            names = {"world": world, "__name__": "fragment"}
            exec(PRELUDE, names)
            _run(block, fragment, names)


if __name__ == "__main__":
    assert pathlib.Path.cwd() != harness.ROOT, "it writes files"
    sys.exit(main())
